"""Which rows a leader takes for lost, what it does with them, and what a copy of it may run."""

from __future__ import annotations

import dataclasses
import datetime as dt
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from psycopg.rows import namedtuple_row

from celery_pglock import claims, keys, ledger, rescue, sessions, statements, working_transactions
from tests.integration.workbench import (
    PERIOD,
    Gate,
    Sessions,
    advisory_locks,
    in_thread,
    replaced,
    row,
    work,
)
from tests.support.databases import Database
from tests.support.processes import eventually

LEDGER = ledger.Ledger()
LEVELS: list[sessions.Level] = ["session", "transaction"]
RUN_LOCK = {
    "session": b"pg_catalog.pg_try_advisory_lock(%(run_key)s::bigint)",
    "transaction": b"pg_catalog.pg_try_advisory_xact_lock(%(run_key)s::bigint)",
}
HOUR = 3600.0

both_levels = pytest.mark.parametrize("level", LEVELS)


class RanTwice(AssertionError):
    """What was started and failed would be run a second time by a rescue copy."""


class Clock:
    """A monotonic clock that goes on when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@dataclasses.dataclass
class Scene:
    """A rescuer over a real database, with its copies in a list instead of a broker.

    Attributes:
        database: the database.
        rescuer: the engine.
        clock: its clock.
        sent: what was sent.
        closed: what was given up.
        taken: whether the broker takes a copy.
        refuse: why a row is not wanted any more.
        before: called before a copy is sent.
    """

    database: Database
    clock: Clock
    rescuer: rescue.Rescuer = dataclasses.field(init=False)
    sent: list[rescue.Copy] = dataclasses.field(default_factory=list)
    closed: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    taken: bool = True
    refuse: str | None = None
    before: Callable[[], object] = lambda: None
    looks: int = 0

    def look(self, after: float = 1000.0) -> list[rescue.Copy]:
        """Let the time pass, look once, and return what was sent."""
        self.clock.now += after
        count, looks = len(self.sent), self.looks
        self.rescuer.work(300.0)
        assert self.looks == looks + 1
        return self.sent[count:]

    def send(self, copy: rescue.Copy) -> bool:
        self.before()
        if self.taken:
            self.sent.append(copy)
        return self.taken

    def close(self, lost: rescue.Lost, outcome: str, reason: str) -> None:
        self.closed.append((lost.period, outcome, reason))


def make_scene(
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    *,
    sent_after: float | None = 900.0,
    lost_after: float | None = 60.0,
) -> Scene:
    connection = database.connect(row_factory=namedtuple_row)
    scene = Scene(database, Clock())

    def execute(query: bytes, parameters: Mapping[str, Any]) -> list[Any]:
        if b"as materialized" in query:
            scene.looks += 1
        cursor = connection.execute(query, parameters)
        return cursor.fetchall() if cursor.rownumber is not None else []

    monkeypatch.setattr(rescue, "time", scene.clock)
    scene.rescuer = rescue.Rescuer(
        execute=execute,
        schema="pglock",
        namespace="app",
        sent_after=sent_after,
        lost_after=lost_after,
        unwanted=lambda _, __: scene.refuse,
        send=scene.send,
        closed=scene.close,
    )
    scene.rescuer.begin()
    return scene


@pytest.fixture
def scene(database: Database, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return make_scene(database, monkeypatch)


def add(database: Database, status: str, **columns: object) -> None:
    """Insert the row of an entry; columns that end in `_ago` are seconds before now."""
    values: dict[str, object] = {
        "job": "app:report",
        "period": PERIOD,
        "status": status,
        "task": "report",
        "task_id": "m-1",
        "entry": "report",
    }
    for name, value in columns.items():
        if name.endswith("_ago"):
            assert isinstance(value, float | int)
            values[name[:-4] + "_at"] = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=value)
        else:
            values[name] = value
    database.rows(
        f"insert into pglock.job_runs ({', '.join(values)})"  # noqa: S608 - names of this file
        f" values ({', '.join(['%s'] * len(values))})",
        *values.values(),
    )


def add_dead(database: Database, **columns: object) -> None:
    add(
        database,
        "running",
        **{"attempts": 1, "claim": uuid.uuid4(), "started_ago": HOUR, **columns},
    )


LOST: dict[str, tuple[str, dict[str, object]]] = {
    "sent long ago": ("sent", {"sent_ago": 901}),
    "sent and given back": ("sent", {"sent_ago": 901, "attempts": 2}),
    "dead": ("running", {"attempts": 1, "claim": uuid.uuid4(), "started_ago": HOUR}),
    "its retry is overdue": ("retrying", {"attempts": 1, "retry_ago": 61, "started_ago": HOUR}),
    "a retry of unknown date": ("retrying", {"attempts": 1, "started_ago": 61}),
}
NEVER_LOST: dict[str, tuple[str, dict[str, object]]] = {
    "not confirmed": ("sent", {}),
    "sent just now": ("sent", {"sent_ago": 890}),
    "just claimed": ("running", {"attempts": 1, "started_ago": 1, "claim": uuid.uuid4()}),
    "its retry is not due yet": ("retrying", {"attempts": 1, "retry_ago": -60}),
    "its retry was due just now": ("retrying", {"attempts": 1, "retry_ago": 50}),
    "a retry of unknown date, started just now": ("retrying", {"attempts": 1, "started_ago": 50}),
    **{
        f"{status}, opened again": (
            status,
            {
                "reason": "opened again by x",
                "attempts": 1,
                "sent_ago": HOUR,
                "started_ago": HOUR,
                "retry_ago": HOUR,
            },
        )
        for status in ("sent", "running", "retrying")
    },
    **{
        status: (status, {"sent_ago": HOUR, "started_ago": HOUR, "retry_ago": HOUR})
        for status in ("done", "failed", "skipped", "missed")
    },
    "without an entry": ("sent", {"sent_ago": HOUR, "entry": None}),
    "another namespace": ("sent", {"sent_ago": HOUR, "job": "app2:report"}),
    "a namespace that begins alike": ("sent", {"sent_ago": HOUR, "job": "ap:report"}),
}


@pytest.mark.parametrize("name", LOST)
def test_what_nobody_works_on_is_sent_again(scene: Scene, name: str) -> None:
    status, columns = LOST[name]
    add(scene.database, status, **columns)
    copies = scene.look() or scene.look()
    assert [(copy.row.status, copy.number) for copy in copies] == [(status, 1)]
    assert row(scene.database, "status", "rescues", "postponements") == (status, 1, 1)
    assert not scene.look(), "it is sent a second time only after twice the time"


@pytest.mark.parametrize("name", NEVER_LOST)
def test_what_somebody_may_work_on_is_left_alone(scene: Scene, name: str) -> None:
    status, columns = NEVER_LOST[name]
    add(scene.database, status, **columns)
    for _ in range(3):
        assert not scene.look()
    assert not scene.closed


@both_levels
def test_a_run_whose_lock_is_held_is_alive_however_long_it_lasts(
    scene: Scene, lock_sessions: Sessions, level: sessions.Level
) -> None:
    session = lock_sessions.open(scene.database.url, level)
    claimed = LEDGER.claim(session, work(entry="report"), claim=uuid.uuid4())
    assert isinstance(claimed, claims.Claimed)
    if level == "transaction":
        transaction = working_transactions.WorkingTransaction(
            session, LEDGER, work(), claimed.claim
        )
        assert transaction.begin() is None
    scene.database.rows("update pglock.job_runs set started_at = now() - interval '1 day'")
    for _ in range(3):
        assert not scene.look()
    session.close()  # the control: the same row, its lock free
    eventually(lambda: not advisory_locks(scene.database), what="the server has ended the session")
    assert not scene.look()
    assert len(scene.look()) == 1


def test_a_claim_at_transaction_level_without_its_locks_is_too_young(
    scene: Scene, lock_sessions: Sessions
) -> None:
    session = lock_sessions.open(scene.database.url, "transaction")
    assert isinstance(
        LEDGER.claim(session, work(entry="report"), claim=uuid.uuid4()), claims.Claimed
    )
    assert not advisory_locks(scene.database)
    for _ in range(3):
        assert not scene.look()


AWKWARD = [
    ("app:report", "2026-11-29"),
    ("app:Ünïcödé 報告 🐘", "Wöche 48"),
    ("app:it's \"quoted\" $$ \\x00 \\' E'\\n'", "o'clock"),
    ("app:a:b::c:", ":2026:"),
    ("app:100% %s %(job)s {runs}", "% %%"),
    ('app:report{"customer":7,"name":"a\\u0000b"}', "2026-11-29T10:00:00+01:00"),
    ("app:" + "x" * 2000, "line\nbreak\ttab"),
    ("app: spaces ", " "),
]


@pytest.mark.parametrize(("job", "period"), AWKWARD, ids=range(len(AWKWARD)))
def test_the_server_finds_the_same_run_lock_as_a_run_takes(
    scene: Scene, job: str, period: str
) -> None:
    """Held, the row is alive; the control is the next key, which proves nothing."""
    add_dead(scene.database, job=job, period=period)
    holder = scene.database.connect()
    key = keys.of_run("app", job, period)
    holder.execute("select pg_advisory_lock(%s)", [key])
    assert not [*scene.look(), *scene.look()]
    holder.execute("select pg_advisory_unlock_all()")
    holder.execute("select pg_advisory_lock(%s)", [key - 1])
    assert len([*scene.look(), *scene.look()]) == 1


def test_keys_of_all_signs_are_found(scene: Scene) -> None:
    """The two halves of a key are unsigned in pg_locks: as many rows as give each combination."""
    periods = [f"p{number}" for number in range(40)]
    held = {period: keys.of_run("app", "app:report", period) for period in periods}
    assert {(key < 0, bool(key & 0x80000000)) for key in held.values()} == {
        (True, True), (True, False), (False, True), (False, False),
    }  # fmt: skip
    holder = scene.database.connect()
    for period, key in held.items():
        add_dead(scene.database, period=period)
        holder.execute("select pg_advisory_lock(%s)", [key])
    assert not [*scene.look(), *scene.look()]


def test_a_lock_of_another_form_or_another_database_proves_nothing(
    scene: Scene, blank_database: Database
) -> None:
    add_dead(scene.database)
    key = keys.of_run("app", "app:report", PERIOD) % 2**64
    high, low = (half - 2**32 if half >= 2**31 else half for half in divmod(key, 2**32))
    scene.database.connect().execute("select pg_advisory_lock(%s::int, %s::int)", [high, low])
    blank_database.connect().execute(
        "select pg_advisory_lock(%s)", [keys.of_run("app", "app:report", PERIOD)]
    )
    scene.look()
    assert len(scene.look()) == 1


def test_a_run_has_to_be_seen_dead_for_the_whole_time(scene: Scene) -> None:
    add_dead(scene.database)
    assert not scene.look()
    assert not scene.look(59.0)
    assert len(scene.look(31.0)) == 1


def test_another_claim_in_between_is_seen_dead_anew(scene: Scene) -> None:
    add_dead(scene.database)
    assert not scene.look()
    scene.database.rows("update pglock.job_runs set claim = gen_random_uuid()")
    assert not scene.look(100.0)
    assert len(scene.look(100.0)) == 1


def test_a_look_at_which_it_is_alive_begins_anew(scene: Scene) -> None:
    add_dead(scene.database)
    holder = scene.database.connect()
    assert not scene.look()
    holder.execute("select pg_advisory_lock(%s)", [keys.of_run("app", "app:report", PERIOD)])
    assert not scene.look(100.0)
    holder.execute("select pg_advisory_unlock_all()")
    assert not scene.look(100.0)
    assert len(scene.look(100.0)) == 1


def test_another_leadership_sees_for_itself(scene: Scene) -> None:
    add_dead(scene.database)
    assert not scene.look()
    scene.rescuer.begin()
    assert not scene.look(100.0)
    assert len(scene.look(100.0)) == 1


def test_each_copy_waits_twice_as_long_and_after_eight_the_row_is_closed(scene: Scene) -> None:
    add(scene.database, "sent", sent_ago=901)
    wait = 900.0
    for number in range(1, 9):
        assert [copy.number for copy in scene.look()] == [number]
        wait *= 2
        for left, copies in [(1 - 10.0 / wait, 0), (1 + 1.0 / wait, None)]:
            scene.database.rows(
                "update pglock.job_runs set sent_at = now() - make_interval(secs => %s)",
                wait * left,
            )
            if copies == 0:
                assert not scene.look(), number
    assert not scene.look()
    assert row(scene.database, "status", "reason") == (
        "failed",
        "never started, though sent 9 times",
    )
    assert scene.closed == [(PERIOD, "failed", "never started, though sent 9 times")]


def test_a_claim_begins_to_count_anew(scene: Scene, lock_sessions: Sessions) -> None:
    add(scene.database, "sent", sent_ago=10 * HOUR, rescues=3)
    session = lock_sessions.open(scene.database.url)
    assert isinstance(LEDGER.claim(session, work(), claim=uuid.uuid4()), claims.Claimed)
    assert row(scene.database, "rescues") == 0


@pytest.mark.parametrize(("status", "outcome"), [("sent", "missed"), ("retrying", "failed")])
def test_what_is_not_wanted_any_more_is_closed_and_not_sent(
    scene: Scene, status: str, outcome: str
) -> None:
    add(scene.database, status, sent_ago=HOUR, retry_ago=HOUR)
    scene.refuse = "its schedule entry was removed"
    assert not scene.look()
    assert row(scene.database, "status", "reason") == (outcome, scene.refuse)
    assert row(scene.database, "finished_at") is not None
    assert scene.closed == [(PERIOD, outcome, scene.refuse)]


MOVES = {
    "started": "status = 'running', attempts = attempts + 1, claim = gen_random_uuid()",
    "done": "status = 'done', attempts = attempts + 1",
    "started and given back": "attempts = attempts + 1",
    "opened again": "task_id = 'm-2'",
    "another claim": "claim = gen_random_uuid()",
}
COLUMNS = ("status", "attempts", "claim", "task_id", "rescues", "postponements", "reason")


@pytest.mark.parametrize("refuse", [None, "not wanted"])
@pytest.mark.parametrize("move", MOVES)
def test_a_row_that_moves_on_meanwhile_is_not_overwritten(
    scene: Scene, move: str, refuse: str | None
) -> None:
    add(scene.database, "sent", sent_ago=HOUR)
    moved: list[Any] = []

    def move_on() -> None:
        scene.database.rows(f"update pglock.job_runs set {MOVES[move]}")  # noqa: S608
        moved.append(row(scene.database, *COLUMNS))

    scene.before = move_on
    if refuse is not None:
        scene.rescuer.unwanted = lambda _, __: move_on() or refuse  # type: ignore[func-returns-value]
    scene.look()
    assert row(scene.database, *COLUMNS) == moved[0]
    assert not scene.closed


def test_a_copy_that_a_worker_has_postponed_meanwhile_is_not_taken_for_replaced(
    scene: Scene, lock_sessions: Sessions
) -> None:
    """Worker and leader both send a copy with number 1: a 2 in the row would drop them both."""
    add(scene.database, "sent", sent_ago=HOUR)
    session = lock_sessions.open(scene.database.url)
    scene.before = lambda: LEDGER.postpone(session, work(entry="report"), 1, "held")
    (copy,) = scene.look()
    assert copy.number == row(scene.database, "postponements") == 1


def test_a_message_that_was_postponed_just_now_is_not_lost(
    scene: Scene, lock_sessions: Sessions
) -> None:
    add(scene.database, "sent", sent_ago=HOUR)
    LEDGER.postpone(lock_sessions.open(scene.database.url), work(entry="report"), 1, "held")
    assert not scene.look()


def test_what_the_broker_does_not_take_leaves_the_row_as_it_was(scene: Scene) -> None:
    add(scene.database, "sent", sent_ago=HOUR)
    before = row(scene.database, *COLUMNS, "sent_at")
    scene.taken = False
    scene.look()
    assert row(scene.database, *COLUMNS, "sent_at") == before
    scene.taken = True
    assert len(scene.look()) == 1


def test_a_broker_that_takes_nothing_is_asked_once_a_look(scene: Scene) -> None:
    """Each failure may take seconds of a leader's time. An entry that failed goes last."""
    for number, entry in enumerate(["a", "b", "c"]):
        add(
            scene.database,
            "sent",
            sent_ago=HOUR,
            job=f"app:{entry}",
            task_id=f"m-{number}",
            entry=entry,
            due_ago=HOUR - number,
        )
    tried: list[str] = []

    def send(copy: rescue.Copy) -> bool:
        tried.append(copy.row.entry)
        return copy.row.entry != "a"

    scene.rescuer.send = send
    scene.look()
    assert tried == ["a"]
    scene.look()
    assert tried == ["a", "b", "c", "a"]


def pause(database: Database) -> None:
    database.rows(
        "insert into pglock.beat_entries (namespace, entry, task, schedule, anchor, paused_until)"
        " values ('app', 'report', 'report', 'x', now(), 'infinity')"
    )


def test_of_a_paused_entry_what_was_triggered_is_sent_again_all_the_same(scene: Scene) -> None:
    add(scene.database, "sent", sent_ago=HOUR, period="of the schedule")
    add(
        scene.database, "sent", sent_ago=HOUR, period="by hand", task_id="m-2",
        reason="triggered by x",
    )  # fmt: skip
    pause(scene.database)
    assert [(copy.row.period, copy.row.by_hand) for copy in scene.look()] == [("by hand", True)]
    scene.database.rows("delete from pglock.beat_entries")
    assert [(copy.row.period, copy.row.by_hand) for copy in scene.look()] == [
        ("of the schedule", False)
    ]


def test_an_entry_that_is_paused_is_left_alone(scene: Scene) -> None:
    add(scene.database, "sent", sent_ago=HOUR)
    pause(scene.database)
    assert not scene.look()
    scene.database.rows("update pglock.beat_entries set paused_until = now() - interval '1 s'")
    assert len(scene.look()) == 1


@pytest.mark.parametrize(
    ("sent_after", "lost_after", "found"),
    [(None, 60.0, {"running", "retrying"}), (900.0, None, {"sent"})],
)
def test_none_switches_it_off(
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    sent_after: float | None,
    lost_after: float | None,
    found: set[str],
) -> None:
    scene = make_scene(database, monkeypatch, sent_after=sent_after, lost_after=lost_after)
    add(database, "sent", sent_ago=HOUR)
    add(database, "retrying", attempts=1, retry_ago=HOUR, period="b", task_id="m-2")
    add_dead(database, period="c", task_id="m-3")
    copies = [*scene.look(), *scene.look()]
    assert {copy.row.status for copy in copies} == found


def test_both_switched_off_nobody_looks(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make_scene(database, monkeypatch, sent_after=None, lost_after=None)
    add(database, "sent", sent_ago=HOUR)
    scene.clock.now += 10_000
    assert scene.rescuer.work(300.0) == 300.0
    assert scene.looks == 0


@pytest.mark.parametrize(
    ("sent_after", "lost_after", "every"),
    [(900.0, 60.0, 30.0), (None, 60.0, 30.0), (900.0, 10.0, 5.0), (2.0, 60.0, 1.0)],
)
def test_it_looks_every_thirty_seconds_or_twice_in_the_shortest_limit(
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    sent_after: float | None,
    lost_after: float,
    every: float,
) -> None:
    scene = make_scene(database, monkeypatch, sent_after=sent_after, lost_after=lost_after)
    assert scene.rescuer.work(0.25) == 0.25
    assert scene.rescuer.work(300.0) == every
    scene.clock.now += every - 0.5
    assert scene.rescuer.work(300.0) == pytest.approx(0.5)
    assert scene.looks == 0
    scene.look(0.5)
    assert scene.rescuer.work(300.0) == every


def test_a_look_that_takes_long_goes_on_after_what_is_due(scene: Scene) -> None:
    for number in range(5):
        add(
            scene.database,
            "sent",
            sent_ago=HOUR,
            period=str(number),
            due_ago=HOUR - number,
            task_id=f"m-{number}",
        )

    def take_time() -> None:
        scene.clock.now += 0.6

    scene.before = take_time
    assert [copy.row.period for copy in scene.look()] == ["0", "1"]
    assert scene.rescuer.work(300.0) == 0.0
    scene.look(0.0)
    assert [copy.row.period for copy in scene.sent] == ["0", "1", "2", "3", "4"]


def test_of_very_many_a_hundred_are_sent_and_it_comes_back_at_once_for_the_rest(
    scene: Scene,
) -> None:
    """As after a broker has lost all that it had."""
    scene.database.rows(
        "insert into pglock.job_runs (job, period, due_at, status, task, task_id, entry, sent_at)"
        " select 'app:report', n::text, now() - make_interval(secs => 30000 - n), 'sent',"
        " 'report', 'm-' || n, 'report', now() - interval '1 hour'"
        " from generate_series(1, 20000) as n"
    )
    started = time.monotonic()
    first = scene.look()
    took = time.monotonic() - started
    print(f"\nthe first {len(first)} of 20,000: {took:.2f} s")
    assert [copy.row.period for copy in first] == [str(n) for n in range(1, 101)]
    assert took < 5
    # Without any time between.
    assert scene.rescuer.work(300.0) == 0.0
    assert [copy.row.period for copy in scene.sent[100:]] == [str(n) for n in range(101, 201)]
    # The control: where nothing is left it comes back when it always does.
    scene.database.rows("delete from pglock.job_runs where rescues = 0")
    assert scene.rescuer.work(300.0) == 30.0


# --- the two rows of an occurrence under a calendar rule ---------------------------------------


@pytest.mark.parametrize("status", ["running", "retrying", "sent"])
def test_while_its_run_has_an_open_row_the_beats_own_is_left_alone(
    scene: Scene, status: str
) -> None:
    own = "2026-11-29T10:00:00.000000+00:00"
    add(scene.database, "sent", sent_ago=10 * HOUR, period=own)
    add(
        scene.database, status, job="app:daily", attempts=1, started_ago=1, retry_ago=-9, sent_ago=1
    )
    for _ in range(3):
        assert not scene.look()
    scene.database.rows("delete from pglock.job_runs where job = 'app:daily'")
    assert [copy.row.period for copy in scene.look()] == [own]


def test_of_two_rows_that_wait_one_is_found(scene: Scene) -> None:
    add(scene.database, "sent", sent_ago=10 * HOUR, period="own", postponements=1)
    add(scene.database, "sent", sent_ago=HOUR, job="app:daily", postponements=2)
    assert [copy.row.job for copy in scene.look()] == ["app:daily"]


# --- what a copy may run -----------------------------------------------------------------------


def claim(session: sessions.Session, wanted: claims.Work) -> claims.Claimed | claims.Refused:
    return LEDGER.claim(session, wanted, claim=uuid.uuid4())


def judge_closed(answer: claims.Claimed | claims.Refused) -> None:
    if isinstance(answer, claims.Claimed):
        raise RanTwice
    assert answer.kind == "closed"


@both_levels
@pytest.mark.parametrize("status", ["sent", "running", "failed", "retrying"])
def test_a_copy_runs_what_is_as_it_saw_it(
    database: Database, lock_sessions: Sessions, level: sessions.Level, status: str
) -> None:
    add(database, status, attempts=2, started_ago=HOUR, claim=uuid.uuid4())
    answer = claim(lock_sessions.open(database.url, level), work(seen=2))
    assert isinstance(answer, claims.Claimed)
    assert answer.attempt == 3


@both_levels
@pytest.mark.parametrize("status", ["running", "failed", "retrying"])
def test_a_copy_does_not_run_what_was_started_since(
    database: Database, lock_sessions: Sessions, level: sessions.Level, status: str
) -> None:
    add(database, status, attempts=3, started_ago=HOUR, claim=uuid.uuid4())
    session = lock_sessions.open(database.url, level)
    judge_closed(claim(session, work(seen=2)))
    assert row(database, "status", "attempts") == (status, 3)
    assert not advisory_locks(database)
    with pytest.raises(RanTwice):  # the control: the same message without the mark
        judge_closed(claim(session, work()))


@both_levels
def test_a_copy_runs_what_was_claimed_and_given_back(
    database: Database, lock_sessions: Sessions, level: sessions.Level
) -> None:
    add(database, "sent", attempts=3)
    answer = claim(lock_sessions.open(database.url, level), work(seen=2))
    assert isinstance(answer, claims.Claimed)


@both_levels
@pytest.mark.parametrize(
    ("status", "granted"), [("running", True), ("failed", False), ("retrying", False)]
)
def test_a_copy_that_is_delivered_again_goes_on_with_a_run_that_died(
    database: Database,
    lock_sessions: Sessions,
    level: sessions.Level,
    status: str,
    *,
    granted: bool,
) -> None:
    """Its own run, when its worker was killed and the broker gives it to another."""
    add(database, status, attempts=3, started_ago=HOUR, claim=uuid.uuid4())
    answer = claim(lock_sessions.open(database.url, level), work(seen=2, again=True))
    assert isinstance(answer, claims.Claimed) is granted


def claim_late(
    database: Database,
    lock_sessions: Sessions,
    level: sessions.Level,
    spoil: Callable[[bytes], bytes] = lambda text: text,
) -> claims.Claimed | claims.Refused:
    """Claim for a copy whose lock comes only after the original message has run and failed."""
    ours, rivals = (lock_sessions.open(database.url, level) for _ in range(2))
    add(database, "sent", sent_ago=HOUR)
    gate = Gate(database)
    text = gate.before(spoil(statements.claim("pglock", level)), RUN_LOCK[level])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statements, "claim", lambda *_: text)
        with in_thread(lambda: claim(ours, work(seen=0)), gate) as answer:
            gate.wait_for_arrival()
            patch.undo()
            claimed = claim(rivals, work())
            assert isinstance(claimed, claims.Claimed)
            if level == "transaction":
                transaction = working_transactions.WorkingTransaction(
                    rivals, LEDGER, work(), claimed.claim
                )
                assert transaction.begin() is None
                assert transaction.abandon("failed", "error", "no", None)
            else:
                assert LEDGER.settle(rivals, work(), claimed.claim, "failed", reason="error")
            gate.open()
            return answer.result(20)


@both_levels
def test_what_fails_between_snapshot_and_lock_is_not_run_again_by_a_copy(
    database: Database, lock_sessions: Sessions, level: sessions.Level
) -> None:
    judge_closed(claim_late(database, lock_sessions, level))
    assert row(database, "status", "attempts") == ("failed", 1)
    assert not advisory_locks(database)


@both_levels
def test_control_asked_of_the_snapshot_alone_it_is_run_again(
    database: Database, lock_sessions: Sessions, level: sessions.Level
) -> None:
    def spoil(text: bytes) -> bytes:
        return replaced(text, b" or %(moved)s::text ~ r.status and r.attempts > %(seen)s::int", b"")

    with pytest.raises(RanTwice):
        judge_closed(claim_late(database, lock_sessions, level, spoil))


OWN = "2026-11-29T10:00:00.000000+00:00"


def seen(database: Database, lock_sessions: Sessions) -> int | None:
    wanted = work(job="app:daily", origin=("app:report", OWN))
    return LEDGER.seen(lock_sessions.open(database.url), wanted)


@pytest.mark.parametrize("status", ["running", "failed", "done", "retrying"])
def test_under_a_calendar_rule_a_copy_sees_the_attempts_of_other_occurrences(
    database: Database, lock_sessions: Sessions, status: str
) -> None:
    add(database, "sent", period=OWN)
    add(database, status, job="app:daily", task_id="m-0", attempts=4)
    assert seen(database, lock_sessions) == 4


def test_under_a_calendar_rule_a_first_run_has_no_attempts(
    database: Database, lock_sessions: Sessions
) -> None:
    add(database, "sent", period=OWN)
    assert seen(database, lock_sessions) == 0


@pytest.mark.parametrize("status", ["running", "retrying"])
def test_under_a_calendar_rule_a_message_that_was_started_is_not_lost(
    database: Database, lock_sessions: Sessions, status: str
) -> None:
    add(database, "sent", period=OWN)
    add(database, status, job="app:daily", task_id="m-1", attempts=1)
    assert seen(database, lock_sessions) is None


@pytest.mark.parametrize("status", ["failed", "done", "skipped", "missed"])
def test_under_a_calendar_rule_an_occurrence_that_is_settled_is_not_run(
    database: Database, lock_sessions: Sessions, status: str
) -> None:
    add(database, status, period=OWN)
    add(database, "failed", job="app:daily", attempts=1)
    assert seen(database, lock_sessions) is None
