"""Which deed each kind of fault is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from typing_extensions import override

from tests.chaos import plan
from tests.chaos.hurt_processes import HurtsProcesses
from tests.chaos.hurt_servers import HurtsServers

Deed = Callable[["Deeds", plan.Fault], bool]


class Deeds(HurtsProcesses, HurtsServers):
    """Does what is due of a plan whenever `step` is called."""

    @override
    def _deed(self, fault: plan.Fault) -> bool:
        return DEEDS[fault.kind](self, fault)


#: What is done for each kind of fault.
DEEDS: Final[Mapping[plan.Kind, Deed]] = {
    "kill child": Deeds.kill_child,
    "kill parent": Deeds.kill_parent,
    "kill worker": Deeds.kill_worker,
    "stop worker": Deeds.stop_worker,
    "freeze child": Deeds.freeze_child,
    "freeze worker": Deeds.freeze_worker,
    "kill leader": Deeds.kill_leader,
    "kill standby": Deeds.kill_standby,
    "stop leader": Deeds.stop_leader,
    "freeze leader": Deeds.freeze_leader,
    "freeze standby": Deeds.freeze_standby,
    "end session of a run": Deeds.end_session_of_a_run,
    "end session of the leader": Deeds.end_session_of_the_leader,
    "end session of nobody": Deeds.end_session_of_nobody,
    "end all sessions": Deeds.end_all_sessions,
    "restart database fast": Deeds.restart_database_fast,
    "restart database immediate": Deeds.restart_database_immediate,
    "promote standby server": Deeds.promote_standby_server,
    "drop packets": Deeds.drop_packets,
    "restart broker": Deeds.restart_broker,
    "kill broker": Deeds.kill_broker,
    "flush broker": Deeds.flush_broker,
    "send again": Deeds.send_again,
    "deliver again": Deeds.deliver_again,
    "step clock": Deeds.step_clock,
    "fork storm": Deeds.fork_storm,
}
