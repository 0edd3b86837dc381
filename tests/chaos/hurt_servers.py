"""What is done to servers and to the ways to them: sessions, PostgreSQL, the broker, packets, clocks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import psycopg
import redis

from celery_pglock.demo.servers import PostgresServer
from celery_pglock.demo.servers.postgres import StopMode
from tests.chaos import plan
from tests.chaos.hurting import Hurting
from tests.chaos.stage import until
from tests.support.namespaces import Hole

_SESSIONS: Final = b"""
SELECT pid, application_name FROM pg_stat_activity
WHERE datname = current_database() AND application_name ~ %s ORDER BY pid
"""
_HOLES: Final[Mapping[str, Hole]] = {
    "both ways": "both ways",
    "to server": "to server",
    "to client": "to client",
}


class HurtsServers(Hurting):
    """Does it to what the actors talk to."""

    _dropping = False

    def end_session_of_a_run(self, fault: plan.Fault) -> bool:
        return self._end_sessions(fault, r"^pglock:(?!leader|standby|idle|startup)[a-z]+@")

    def end_session_of_the_leader(self, fault: plan.Fault) -> bool:
        return self._end_sessions(fault, "^pglock:leader:", leader=True)

    def end_session_of_nobody(self, fault: plan.Fault) -> bool:
        return self._end_sessions(fault, "^pglock:(idle|standby)")

    def end_all_sessions(self, fault: plan.Fault) -> bool:
        return self._end_sessions(fault, "^pglock:", everyone=True)

    def _end_sessions(
        self, fault: plan.Fault, pattern: str, *, leader: bool = False, everyone: bool = False
    ) -> bool:
        try:
            with self._database() as connection:
                found = connection.execute(_SESSIONS, [pattern]).fetchall()
                if not found:
                    return False
                if not everyone:
                    found = [found[fault.index % len(found)]]
                # Each tells at its end which process it belongs to.
                owners = [int(name.rpartition(":")[2] or 0) for _, name in found]
                victims = None if everyone else owners
                number = self.strike(fault, "session", victims, leader=leader)
                for pid, _ in found:
                    connection.execute("SELECT pg_terminate_backend(%s)", [pid])
                self.over(number)
        except (psycopg.Error, ValueError):
            return False
        return True

    def _database(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.stage.server.url(), autocommit=True, connect_timeout=2)

    def restart_database_fast(self, fault: plan.Fault) -> bool:
        return self._restart_database(fault, "fast")

    def restart_database_immediate(self, fault: plan.Fault) -> bool:
        return self._restart_database(fault, "immediate")

    def _restart_database(self, fault: plan.Fault, mode: StopMode) -> bool:
        number = self.strike(fault, "session", None)
        self.stage.server.stop(mode)
        time.sleep(min(fault.lasts, 0.5))
        self.stage.server.start()
        self.over(number)
        return True

    def promote_standby_server(self, fault: plan.Fault) -> bool:
        """Have a synchronous standby, kill the primary, and promote the standby."""
        old = self.stage.server
        new = old.standby({"cluster_name": "next"})
        new.port = next(port for port in self.stage.ports if port != old.port)
        new.start()
        self._make_synchronous(old)
        number = self.strike(fault, "session", None)
        old.kill()
        self.stage.server = new
        new.promote()
        with self._database() as connection:
            connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
            connection.execute("SELECT pg_reload_conf()")
        self.over(number)
        old.close()
        return True

    @staticmethod
    def _make_synchronous(server: PostgresServer) -> None:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'next'")
            connection.execute("SELECT pg_reload_conf()")
            query = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"
            if not until(lambda: connection.execute(query).fetchall(), 20.0):
                raise AssertionError("the standby server did not come up")
            time.sleep(0.5)

    def drop_packets(self, fault: plan.Fault) -> bool:
        namespace = self.stage.namespace
        pids = [pid for actor in self.stage.far for pid in actor.pids()]
        if namespace is None or not pids or self._dropping:
            return False
        leader = self.watch.leader in pids
        number = self.strike(fault, "session", pids, leader=leader)
        namespace.block(_HOLES[fault.detail])
        self._dropping = True

        def heal() -> None:
            namespace.heal()
            self._dropping = False
            self.over(number)

        self.after(fault.lasts, heal)
        return True

    # --- the broker -----------------------------------------------------------------------------

    def restart_broker(self, fault: plan.Fault) -> bool:
        return self._restart_broker(fault, self.stage.broker.stop)

    def kill_broker(self, fault: plan.Fault) -> bool:
        return self._restart_broker(fault, self.stage.broker.kill)

    def _restart_broker(self, fault: plan.Fault, end: Callable[[], None]) -> bool:
        broker = self.stage.broker
        if not broker.running:
            return False
        number = self.strike(fault, "broker", None)
        end()

        def start() -> None:
            broker.start()
            self.over(number)

        self.after(fault.lasts, start)
        return True

    def flush_broker(self, fault: plan.Fault) -> bool:
        if not self.stage.broker.running:
            return False
        number = self.strike(fault, "broker", None)
        with (
            contextlib.suppress(redis.RedisError),
            redis.Redis.from_url(self.stage.broker.url()) as broker,
        ):
            broker.flushall()
        self.over(number)
        return True

    def send_again(self, fault: plan.Fault) -> bool:
        return self._again(fault, same_id=False)

    def deliver_again(self, fault: plan.Fault) -> bool:
        return self._again(fault, same_id=True)

    def _again(self, fault: plan.Fault, *, same_id: bool) -> bool:
        if not self.stage.broker.running or not self.sender.sample:
            return False
        number = self.strike(fault, "none", [])
        message = self.sender.sample[fault.index % len(self.sender.sample)]
        self.sender.again(message, same_id=same_id)
        self.over(number)
        return True

    # --- the rest -------------------------------------------------------------------------------

    def step_clock(self, fault: plan.Fault) -> bool:
        if self.stage.clock is None:
            return False
        number = self.strike(fault, "none", [])
        self.stage.clock.set(fault.lasts)
        self.over(number)
        return True

    def fork_storm(self, fault: plan.Fault) -> bool:
        number = self.strike(fault, "none", [])
        storm = self.stage.events / "storm"
        storm.touch()

        def calm() -> None:
            storm.unlink(missing_ok=True)
            self.over(number)

        self.after(fault.lasts, calm)
        return True
