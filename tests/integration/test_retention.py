"""What is deleted, what never is, and that nothing runs again because its row is gone."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import statistics
import threading
import time
import uuid
import zoneinfo
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, get_args

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.rows import namedtuple_row

from celery_pglock import claims, ledger, periods, retention, statements, table_names
from tests.integration.workbench import Gate, Sessions, in_thread, replaced, row, work
from tests.support.databases import Database
from tests.support.processes import eventually

DAY = 86400.0
KEEP = 30 * DAY
NOW = dt.datetime.now(dt.UTC)
ZONE = zoneinfo.ZoneInfo("Europe/Berlin")
SETTLED = ["done", "failed", "skipped", "missed"]
UNSETTLED = ["sent", "running", "retrying"]
# The figures in the report are of 1,000,000 rows.
ROWS = int(os.environ.get("PGLOCK_TEST_ROWS", "100000"))
EXAMPLES = int(os.environ.get("PGLOCK_TEST_EXAMPLES", "60"))

Execute = Callable[[bytes, Mapping[str, Any]], list[Any]]


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the days of each test from its own beginning, not from that of a long session."""
    monkeypatch.setitem(globals(), "NOW", dt.datetime.now(dt.UTC))


def days(number: float) -> dt.timedelta:
    return dt.timedelta(days=number)


def add(
    database: Database,
    period: str,
    *,
    job: str = "app:report",
    status: str = "done",
    due: float | None = None,
    finished: float | None = 40,
    **columns: object,
) -> None:
    """Insert a row that was due, and settled, so many days ago."""
    columns = {
        "job": job,
        "period": period,
        "status": status,
        "due_at": None if due is None else NOW - days(due),
        "finished_at": None if finished is None else NOW - days(finished),
        **columns,
    }
    database.rows(
        f"insert into pglock.job_runs ({', '.join(columns)})"  # noqa: S608 - names of this file
        f" values ({', '.join(['%s'] * len(columns))})",
        *columns.values(),
    )


def occurrence(ago: float) -> str:
    return periods.occurrence(NOW - days(ago))


def add_occurrence(database: Database, ago: float, **more: Any) -> str:
    """Insert a row of an occurrence that was due so many days ago."""
    label = occurrence(ago)
    add(database, label, **{"due": ago, "finished": ago, **more})
    return label


def left(database: Database, job: str | None = None) -> list[str]:
    """Return the periods of which there are rows."""
    query = "select period from pglock.job_runs where job = coalesce(%s, job) order by job, period"
    return [period for (period,) in database.rows(query, job)]


@contextlib.contextmanager
def executing(database: Database, rewrite: Callable[[bytes], bytes] = bytes) -> Iterator[Execute]:
    with psycopg.connect(database.url, autocommit=True, row_factory=namedtuple_row) as connection:
        connection.execute("set jit = off")  # as the leader and the command do

        def execute(query: bytes, parameters: Mapping[str, Any]) -> list[Any]:
            return connection.execute(rewrite(query), parameters).fetchall()

        yield execute


def walk(
    database: Database,
    most: int = retention.BATCH,
    rewrite: Callable[[bytes], bytes] = bytes,
    **more: Any,
) -> list[int]:
    """Walk over the history once; return how many rows each statement deleted."""
    given = {"schema": "pglock", "namespace": "app", "keep": KEEP, **more}
    with executing(database, rewrite) as execute:
        steps = retention.Pass(execute=execute, **given)
        removed = []
        while not steps.ended:
            removed.append(steps.step(most))
        assert steps.removed == sum(removed)
    return removed


# --- what goes, and what never does ------------------------------------------------------------


@pytest.mark.parametrize("status", SETTLED)
def test_what_is_settled_and_old_goes(database: Database, status: str) -> None:
    add_occurrence(database, 31, status=status)
    newer = add_occurrence(database, 29)
    assert walk(database) == [1]
    assert left(database) == [newer]


@pytest.mark.parametrize("status", UNSETTLED)
def test_what_is_not_settled_never_goes(database: Database, status: str) -> None:
    old = add_occurrence(database, 400, status=status)
    newer = add_occurrence(database, 399)
    assert walk(database) == [0]
    assert left(database) == [old, newer]


@pytest.mark.parametrize(("due", "finished"), [(400, 29), (29, 400)])
def test_what_was_due_or_settled_recently_stays(
    database: Database, due: float, finished: float
) -> None:
    old = add_occurrence(database, due, finished=finished)
    newer = add_occurrence(database, 1)
    assert walk(database) == [0]
    assert left(database) == [old, newer]


def test_the_newest_of_each_job_stays(database: Database) -> None:
    newest = []
    for job in ("app:a", "app:b"):
        labels = [add_occurrence(database, ago, job=job) for ago in (300, 200, 100)]
        newest.append(labels[-1])
    assert sum(walk(database)) == 4
    assert left(database) == newest
    assert sum(walk(database)) == 0


def test_of_a_job_of_single_messages_the_last_one_stays(database: Database) -> None:
    # Their labels do not sort by time.
    for label, ago in [("id:m", 100), ("id:a", 70), ("id:z", 80), ("id:b", 90)]:
        add(database, label, finished=ago)
    assert sum(walk(database)) == 3
    assert left(database) == ["id:a"]


def test_a_job_that_changed_its_rule_keeps_the_newest_of_each_kind(database: Database) -> None:
    """Sorted by its label a week stands after every day, so it would be taken for the newest."""
    for label, ago in [("2025-W01", 300), ("2025-W02", 290), ("2025-11", 280), ("2025-12", 250)]:
        add(database, label, due=ago, finished=ago)
    for label, ago in [("2026-02-01", 200), ("2026-02-02", 199), ("id:x", 150), ("id:w", 140)]:
        add(database, label, due=ago, finished=ago)
    assert sum(walk(database)) == 4
    assert left(database) == ["2025-12", "2025-W02", "2026-02-02", "id:w"]


def test_a_functions_labels_need_not_sort(database: Database) -> None:
    """1.10 came after 1.9, and is in use: as the greatest label 1.9 would stay in its place."""
    for label, ago in [("1.8", 900), ("1.9", 800), ("1.10", 700)]:
        add(database, label, due=ago, finished=ago)
    assert sum(walk(database)) == 2
    assert left(database) == ["1.10"]


def test_each_application_deletes_its_own(database: Database) -> None:
    others = ["ap:j", "app.x:j", "app2:j", "other:app:j", "App:j"]
    for job in ("app:j", *others):
        for ago in (200, 100):
            add_occurrence(database, ago, job=job)
    assert sum(walk(database)) == 1
    assert len(left(database, "app:j")) == 1
    assert [len(left(database, job)) for job in others] == [2] * len(others)
    assert sum(walk(database, namespace="app.x")) == 1


def test_a_dry_run_counts_the_same_and_deletes_nothing(database: Database) -> None:
    for ago in range(31, 61):
        add_occurrence(database, ago)
        add(database, f"id:{ago}", job="app:m", finished=ago)
    before = left(database)
    assert sum(walk(database, most=7, dry=True)) == 58
    assert left(database) == before
    with executing(database) as execute:
        steps = retention.Pass(
            execute=execute, schema="pglock", namespace="app", keep=KEEP, dry=True
        )
        while not steps.ended:
            steps.step(7)
    assert left(database) == before
    assert steps.removed == sum(walk(database, most=7)) == 58


# label of the row, of the next one, days from the one to the other, and how much longer it stays
REACHES = [
    ("2026-03-02T14:05+01:00", "2026-03-02T14:06+01:00", 1 / 1440, 2),
    ("2026-03-02T14+01:00", "2026-03-02T15+01:00", 1 / 24, 2),
    ("2026-03-02T14:05Z", "2026-03-02T14:06Z", 1 / 1440, 367),
    ("2026-03-02", "2026-03-03", 1, 2),
    ("2026-W09", "2026-W10", 7, 8),
    ("2026-03", "2026-04", 31, 32),
    ("spring", "summer", 92, 367),
    ("2026", "2027", 365, 367),
]


@pytest.mark.parametrize(("label", "following", "apart", "reach"), REACHES)
def test_a_period_that_is_longer_than_an_instant_stays_for_longer(
    database: Database, label: str, following: str, apart: float, reach: float
) -> None:
    """Another message of the period may be due up to its end, and must not become stale later."""
    for more, goes in [(-0.02, False), (0.02, True)]:
        database.rows("truncate pglock.job_runs")
        ago = 30 + reach + more
        add(database, label, due=ago, finished=ago)
        add(database, following, due=ago - apart, finished=ago - apart)
        assert walk(database) == [int(goes)]


def test_a_function_may_give_a_quarter_the_label_of_a_month_or_a_day(database: Database) -> None:
    """It stays until the quarter after it is beyond the horizon: all of its own is stale then."""
    for first, second in [("2026-04", "2027-01"), ("2026-10-01", "2027-01-01")]:
        database.rows("truncate pglock.job_runs")
        add(database, first, due=120, finished=120)
        add(database, second, due=29, finished=29)
        assert walk(database) == [0]
        database.rows("update pglock.job_runs set due_at = due_at - interval '2 days'")
        assert walk(database) == [1]
        assert left(database) == [second]


# --- in between -------------------------------------------------------------------------------

STARTS = b"pg_catalog.starts_with(s.job, %(prefix)s::text)"
FREE = b"array(select f.ctid from free f)"


def prune_while(
    database: Database, change: str, rewrite: Callable[[bytes], bytes] = bytes
) -> list[int]:
    """Have a row changed between the snapshot of the statement and its deletion."""
    gate = Gate(database)
    with in_thread(
        lambda: walk(database, rewrite=lambda text: gate.before(rewrite(text), STARTS)), gate
    ) as removed:
        gate.wait_for_arrival()
        database.rows(change)
        gate.open()
        return removed.result(30)


REOPENED = [
    "update pglock.job_runs set status = 'sent', finished_at = null where attempts = 7",
    "update pglock.job_runs set status = 'running' where attempts = 7",
    # Opened and run again, all in that moment.
    "update pglock.job_runs set finished_at = clock_timestamp() where attempts = 7",
]


@pytest.mark.parametrize("change", REOPENED)
def test_a_row_that_is_opened_again_in_between_stays(database: Database, change: str) -> None:
    old = add_occurrence(database, 50, attempts=7)
    add_occurrence(database, 49)
    newest = add_occurrence(database, 48)
    assert prune_while(database, change) == [1]
    assert left(database) == [old, newest]


def test_control_a_bare_deletion_follows_a_row_that_was_just_run(database: Database) -> None:
    add_occurrence(database, 50, attempts=7)
    add_occurrence(database, 49)
    newest = add_occurrence(database, 48)
    bare = b"(select s.job, s.period from seen s, old o where s.ctid = o.ctid)"
    removed = prune_while(
        database,
        REOPENED[2],
        lambda text: replaced(
            text, b"r.ctid = any (" + FREE + b")", b"(r.job, r.period) in " + bare
        ),
    )
    assert removed == [2]
    assert left(database) == [newest]


def test_a_row_that_somebody_holds_is_left_for_the_next_walk(database: Database) -> None:
    labels = [add_occurrence(database, ago) for ago in (50, 49, 48)]
    with psycopg.connect(database.url) as holder:
        holder.execute("select from pglock.job_runs where period = %s for update", [labels[0]])
        # It does not wait, or this would not return.
        assert walk(database) == [1]
        holder.rollback()
    assert left(database) == [labels[0], labels[2]]
    assert walk(database) == [1]


def test_attempts_go_on_when_a_row_goes_while_it_is_claimed(
    database: Database, lock_sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open failure may be claimed however old it is, and its fencing token never comes again."""
    session = lock_sessions.open(database.url)
    label = add_occurrence(database, 50, status="failed", reason="error", attempts=4)
    add_occurrence(database, 49)
    wanted = work(label, due_at=NOW - days(50))
    gate = Gate(database)
    text = gate.before(
        statements.claim("pglock", "session"),
        b"pg_catalog.pg_try_advisory_lock(%(run_key)s::bigint)",
    )
    monkeypatch.setattr(statements, "claim", lambda *_: text)
    with in_thread(lambda: claim(session, wanted), gate) as claimed:
        gate.wait_for_arrival()
        assert walk(database) == [1]
        gate.open()
        answer = claimed.result(30)
    assert isinstance(answer, claims.Claimed)
    assert answer.attempt == 5
    assert row(database, "status", "attempts", period=label) == ("running", 5)


# --- nothing runs again because its row is gone -----------------------------------------------


def claim(
    session: Any, wanted: claims.Work, keep: float | None = KEEP
) -> claims.Claimed | claims.Refused:
    return ledger.Ledger(keep=keep).claim(session, wanted, claim=uuid.uuid4())


def kind(answer: claims.Claimed | claims.Refused) -> str:
    return answer.kind if isinstance(answer, claims.Refused) else "claimed"


@pytest.mark.parametrize("level", ["session", "transaction"])
def test_what_was_due_beyond_the_horizon_and_has_no_row_is_stale(
    database: Database, lock_sessions: Sessions, level: Any
) -> None:
    session = lock_sessions.open(database.url, level)
    for ago, expected in [(30.01, "stale"), (29.99, "claimed")]:
        wanted = work(occurrence(ago), due_at=NOW - days(ago))
        answer = claim(session, wanted)
        assert kind(answer) == expected
        if isinstance(answer, claims.Claimed):
            assert ledger.Ledger().settle(session, wanted, answer.claim, "done")
    # Nothing is written of what is stale, and nothing held.
    assert left(database) == [occurrence(29.99)]
    assert not session.held
    # Without a due instant, or with history for ever, nothing is.
    assert kind(claim(session, work(occurrence(31), due_at=NOW - days(31)), None)) == "claimed"


@pytest.mark.parametrize("status", ["sent", "failed", "retrying"])
def test_what_is_open_is_never_stale(
    database: Database, lock_sessions: Sessions, status: str
) -> None:
    label = add_occurrence(database, 400, status=status, finished=None)
    session = lock_sessions.open(database.url)
    assert kind(claim(session, work(label, due_at=NOW - days(400)))) == "claimed"


def test_the_clock_is_read_after_the_snapshot(database: Database, lock_sessions: Sessions) -> None:
    """Read before, a row could be pruned in between, and its message not be stale yet."""
    session = lock_sessions.open(database.url)
    session.connection.execute("begin")
    ((began,),) = session.connection.execute("select now()").fetchall()
    due = began - dt.timedelta(seconds=59.9)
    wanted = work(periods.occurrence(due), due_at=due)
    past = "select clock_timestamp() - %s > interval '60 s'"
    eventually(lambda: database.rows(past, due)[0][0], what="the horizon has passed it")
    assert kind(claim(session, wanted, 60.0)) == "stale"
    session.connection.execute("commit")


def quarter(moment: dt.datetime) -> str:
    return f"{moment.year}-{(moment.month - 1) // 3 + 1:02}"


def quarter_by_day(moment: dt.datetime) -> str:
    return f"{moment.year}-{(moment.month - 1) // 3 * 3 + 1:02}-01"


def year(moment: dt.datetime) -> str:
    return f"{moment.year}"


def half(moment: dt.datetime) -> str:
    return f"{'first' if moment.month < 7 else 'second'} half of {moment.year}"


FUNCTIONS = {function.__name__: function for function in (quarter, quarter_by_day, year, half)}
RULES = ["occurrence", *get_args(periods.Calendar), *FUNCTIONS]
LENGTHS = {"occurrence": 1e-6, "minute": 1 / 1440, "hour": 1 / 24, "day": 1.05, "week": 7.1}


def label_of(rule: Any, moment: dt.datetime) -> str:
    if rule == "occurrence":
        return periods.occurrence(moment)
    if rule in FUNCTIONS:
        return FUNCTIONS[rule](moment.astimezone(ZONE))
    return periods.calendar(rule, moment, ZONE)


@pytest.mark.parametrize("rule", RULES)
def test_a_period_whose_row_is_gone_is_never_run_again(
    database: Database, lock_sessions: Sessions, rule: Any
) -> None:
    """Whatever history there is, and whenever in the period another message was due."""
    session = lock_sessions.open(database.url)
    connection: Any = database.connect(row_factory=namedtuple_row)
    seen = {"stale": 0, "closed": 0}

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        print_blob=True,
        database=None,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )
    @given(
        ages=st.lists(st.floats(0.001, 900), min_size=1, max_size=6),
        keep=st.sampled_from([60.0, DAY, KEEP]),
        near=st.booleans(),
        at=st.floats(0, 1),
    )
    def check(ages: list[float], keep: float, near: bool, at: float) -> None:  # noqa: FBT001
        now = dt.datetime.now(dt.UTC)
        length = LENGTHS.get(rule, 366.0)
        ages = sorted(ages, reverse=True)
        if near:
            # Around the horizon, where it matters.
            ages = [keep / DAY + age / 300 * length for age in ages]
        connection.execute("delete from pglock.job_runs")
        for age in ages:
            moment = now - days(age)
            connection.execute(
                "insert into pglock.job_runs (job, period, due_at, finished_at, status)"
                " values ('app:report', %s, %s, %s, 'done') on conflict do nothing",
                [label_of(rule, moment), moment, moment],
            )
        steps = retention.Pass(
            execute=lambda q, p: connection.execute(q, p).fetchall(),
            schema="pglock",
            namespace="app",
            keep=keep,
        )
        steps.step()
        # Another message of the first period, due at any later instant of it.
        first = now - days(ages[0])
        due = min(first + days(at * min(length, 370)), now)
        if label_of(rule, due) != label_of(rule, first):
            due = first
        answer = claim(session, work(label_of(rule, first), due_at=due), keep)
        assert kind(answer) in seen, (kind(answer), first, due)
        seen[kind(answer)] += 1

    check()
    print(f"\n{rule}: {seen}")
    assert all(seen.values())


def test_control_without_the_refusal_a_pruned_period_is_run_again(
    database: Database, lock_sessions: Sessions
) -> None:
    session = lock_sessions.open(database.url)
    label = add_occurrence(database, 50)
    add_occurrence(database, 49)
    wanted = work(label, due_at=NOW - days(50))
    assert kind(claim(session, wanted, None)) == "closed"
    assert walk(database) == [1]
    assert kind(claim(session, wanted)) == "stale"
    assert kind(claim(session, wanted, None)) == "claimed"


# --- bounded ----------------------------------------------------------------------------------

FILL = """
insert into pglock.job_runs (job, period, due_at, status, attempts, started_at, finished_at)
select %s, to_char(m at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US') || '+00:00', m, 'done', 1,
 m, m from (select now() - make_interval(days => %s, secs => n) as m
  from generate_series(1, %s) as n) as moments
"""


def fill(database: Database, count: int, *, job: str = "app:every-second", ago: int = 40) -> None:
    """Insert so many occurrences of a job that is due every second."""
    database.rows(FILL, job, ago, count)


def explained(database: Database, most: int, generic: bool) -> dict[str, dict[str, Any]]:  # noqa: FBT001
    """Return the nodes of the plan by what they read: the index's and the limit's."""
    nodes: dict[str, dict[str, Any]] = {}

    def collect(node: dict[str, Any]) -> None:
        name = node.get("Index Name", node["Node Type"])
        if name not in nodes:
            nodes[name] = node
        for child in node.get("Plans", []):
            collect(child)

    statement = table_names.statement(retention._PRUNE, "pglock")  # noqa: SLF001
    parameters = {
        "keep": KEEP, "prefix": "app:", "job": "", "period": "", "most": most,
        "finished_at": dt.datetime(1, 1, 1, tzinfo=dt.UTC),
    }  # fmt: skip
    mode = "force_generic_plan" if generic else "auto"
    with psycopg.connect(database.url, options=f"-c plan_cache_mode={mode}") as connection:
        connection.prepare_threshold = 0
        explain = b"explain (analyze, buffers, format json)" + statement
        ((answer,),) = connection.execute(explain, parameters, prepare=generic).fetchall()
        connection.rollback()
    collect(answer[0]["Plan"] if isinstance(answer, list) else json.loads(answer)[0]["Plan"])
    return nodes


@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("analysed", [False, True])
@pytest.mark.parametrize("job", ["app:every-second", "other:every-second"])
def test_a_statement_reads_so_many_rows_and_no_more(
    database: Database, job: str, *, analysed: bool, generic: bool
) -> None:
    """From the index, in its order; also when all the rows are another application's."""
    fill(database, 20000, job=job)
    fill(database, 20000, job=job, ago=1)
    if analysed:
        database.rows("analyze pglock.job_runs")
    with database.connect() as connection:
        server_version = connection.info.server_version
    nodes = explained(database, 100, generic)
    scan = nodes["job_runs_settled_idx"]
    assert "clock" not in scan["Index Cond"]
    assert "finished_at <" in scan["Index Cond"]
    assert "finished_at >=" in scan["Index Cond"]
    # One more than the limit, and a group of equal keys, tells the sort where to stop. Without
    # statistics an older server may read all old rows and sort them.
    if analysed or server_version >= 170000:
        assert scan["Actual Rows"] <= 200
    assert "Seq Scan" not in nodes or not nodes["Seq Scan"]["Actual Loops"], nodes["Seq Scan"]


def test_the_index_is_left_where_rows_become_too_new(database: Database) -> None:
    fill(database, 20000, ago=1)
    for ago in (50, 49, 48):
        add_occurrence(database, ago)
    database.rows("analyze pglock.job_runs")
    scan = explained(database, 1000, generic=False)["job_runs_settled_idx"]
    assert scan["Actual Rows"] == 3
    assert scan.get("Rows Removed by Filter", 0) == 0
    assert scan.get("Rows Removed by Index Recheck", 0) == 0


def test_a_walk_looks_at_each_row_once(database: Database) -> None:
    """Also at those that may not go, of which a whole batch may consist."""
    for number in range(250):
        add_occurrence(database, 40 + number / 1000, job=f"app:{number}")
    fill(database, 100, ago=50)
    removed = walk(database, most=50)
    assert removed == [50, 49, 0, 0, 0, 0, 0, 0]
    assert len(left(database)) == 251


def test_a_claim_does_not_wait_for_a_batch_that_is_still_open(
    database: Database, lock_sessions: Sessions
) -> None:
    fill(database, 1000)
    oldest = "select period, due_at from pglock.job_runs order by period limit 1"
    ((old, due),) = database.rows(oldest)
    session = lock_sessions.open(database.url)
    every_second = {"job": "app:every-second"}
    with psycopg.connect(database.url, row_factory=namedtuple_row) as pruning:
        steps = retention.Pass(
            execute=lambda q, p: pruning.execute(q, p).fetchall(),
            schema="pglock", namespace="app", keep=KEEP,
        )  # fmt: skip
        assert steps.step() == 999
        # Its transaction is open, its rows are not gone for others yet.
        started = time.monotonic()
        assert kind(claim(session, work(old, due_at=due, **every_second))) == "closed"
        fresh = work(occurrence(0), due_at=NOW, **every_second)
        answer = claim(session, fresh)
        assert isinstance(answer, claims.Claimed)
        assert ledger.Ledger().settle(session, fresh, answer.claim, "done")
        assert time.monotonic() - started < 5
        pruning.commit()
    assert kind(claim(session, work(old, due_at=due, **every_second))) == "stale"


class Watch:
    """Looks, from a thread of its own, whether a server process waits for a lock of any kind."""

    def __init__(self, database: Database, pid: int) -> None:
        self._connection = database.connect(application_name="watch")
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.waits: dict[object, float] = {}  # by its kind and beginning, how long each lasted
        self.looks = 0
        self.stalled = 0.0  # the longest time for which nothing was seen

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        query = """
            select locktype, waitstart, extract(epoch from clock_timestamp() - waitstart)::float8
            from pg_locks where pid = %s and not granted and waitstart is not null
        """
        interval, last = 0.005, time.monotonic()
        while not self._stop.wait(interval):
            for what, since, waited in self._connection.execute(query, [self._pid]):
                self.waits[what, since] = max(self.waits.get((what, since), 0.0), waited)
            self.looks += 1
            now = time.monotonic()
            self.stalled = max(self.stalled, now - last - interval)
            last = now

    def has_waited(self) -> bool:
        """Whether it has waited for longer than 100 ms and this machine can have let it."""
        return max(self.waits.values(), default=0.0) > 0.1 + self.stalled


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_claims_go_on_while_a_long_history_is_deleted(
    database: Database, lock_sessions: Sessions
) -> None:
    """C45: each statement below a second, no claim slowed down by 100 ms, none waits for a lock."""
    fill(database, ROWS)
    done = threading.Event()
    session = lock_sessions.open(database.url)
    before: list[float] = []
    during: list[float] = []

    def run_one(into: list[float]) -> None:
        moment = dt.datetime.now(dt.UTC)
        wanted = work(periods.occurrence(moment), job="app:every-second", due_at=moment)
        started = time.perf_counter()
        answer = claim(session, wanted)
        into.append(time.perf_counter() - started)
        assert isinstance(answer, claims.Claimed)
        assert ledger.Ledger().settle(session, wanted, answer.claim, "done")

    def prune() -> list[float]:
        times = []
        try:
            with executing(database) as execute:
                steps = retention.Pass(execute=execute, schema="pglock", namespace="app", keep=KEEP)
                while not steps.ended:
                    started = time.perf_counter()
                    steps.step()
                    times.append(time.perf_counter() - started)
        finally:
            done.set()
        return times

    for _ in range(200):
        run_one(before)
    with Watch(database, session.pid) as watch, in_thread(prune) as pruned:
        while not done.is_set():
            run_one(during)
            done.wait(0.002)
        batches = pruned.result(0)
    ((old,),) = database.rows(
        "select count(*) from pglock.job_runs where finished_at < now() - interval '30 days'"
    )
    assert old == 0
    print(
        f"\n{ROWS} rows in {len(batches)} statements, {sum(batches):.1f} s: median"
        f" {statistics.median(batches) * 1e3:.1f} ms, max {max(batches) * 1e3:.1f} ms; claims:"
        f" before {len(before)}, median {statistics.median(before) * 1e3:.2f} ms, max"
        f" {max(before) * 1e3:.1f} ms; during {len(during)}, median"
        f" {statistics.median(during) * 1e3:.2f} ms, max {max(during) * 1e3:.1f} ms; waits"
        f" {watch.waits} in {watch.looks} looks"
    )
    slack = 0.0 if "PGLOCK_TEST_ROWS" in os.environ else 0.9
    assert max(batches) < 1.0 + slack
    assert max(during) < 0.1 + slack
    assert statistics.median(during) < 0.1
    assert watch.looks > 10
    assert not watch.has_waited()


def test_control_a_claim_that_waits_for_a_lock_is_seen(
    database: Database, lock_sessions: Sessions
) -> None:
    session = lock_sessions.open(database.url)
    blocking = database.connect()
    with Watch(database, session.pid) as watch:
        blocking.execute("begin")
        blocking.execute("lock table pglock.job_runs in access exclusive mode")
        with in_thread(lambda: claim(session, work(occurrence(0), due_at=NOW))) as claimed:
            try:
                eventually(lambda: max(watch.waits.values(), default=0.0) > 0.5, what="it waits")
            finally:
                blocking.execute("rollback")
        assert kind(claimed.result(0)) == "claimed"

    assert max(watch.waits.values()) > 0.5
    assert watch.has_waited()


# --- a leader's upkeep ------------------------------------------------------------------------


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.at = 1000.0

    def monotonic(self) -> float:
        return self.at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(retention, "time", clock)
    return clock


class Leader:
    """Upkeep over a real session, whose statements are counted."""

    def __init__(self, execute: Execute, keep: float | None = KEEP) -> None:
        self._execute = execute
        self.asked = 0
        self.told: list[int] = []
        self.upkeep = retention.Upkeep(self._ask, "pglock", "app", keep, self.told.append)

    def _ask(self, query: bytes, parameters: Mapping[str, Any]) -> list[Any]:
        self.asked += 1
        return self._execute(query, parameters)


@pytest.fixture
def execute(database: Database) -> Iterator[Execute]:
    with executing(database) as execute:
        yield execute


FULL = retention.BATCH


def test_upkeep_begins_late_goes_in_steps_and_tells_once(
    clock: Clock, database: Database, execute: Execute
) -> None:
    fill(database, 2 * FULL + 7)
    leader = Leader(execute)
    upkeep = leader.upkeep
    upkeep.begin()
    assert upkeep.work(300.0) == 30.0
    assert upkeep.work(2.5) == 2.5
    assert leader.asked == 0
    clock.at += 30
    assert upkeep.work(300.0) == 0.25
    assert upkeep.work(300.0) == 0.25
    assert leader.asked == 1
    for _ in range(2):
        clock.at += 0.25
        upkeep.work(300.0)
    assert leader.asked == 3
    assert leader.told == [2 * FULL + 6]
    assert upkeep.work(900.0) == 600.0
    clock.at += 600
    upkeep.work(300.0)
    assert leader.asked == 4
    assert leader.told == [2 * FULL + 6]
    assert len(left(database)) == 1


def test_what_is_due_comes_first_and_nothing_spins(clock: Clock, execute: Execute) -> None:
    leader = Leader(execute)
    leader.upkeep.begin()
    clock.at += 30
    # Due in 50 ms: not now. And it is not asked again before that.
    assert leader.upkeep.work(0.05) == 0.05
    assert leader.asked == 0


def test_a_leader_that_never_rests_does_a_batch_now_and_then(
    clock: Clock, database: Database, execute: Execute
) -> None:
    fill(database, 8 * FULL)
    leader = Leader(execute)
    leader.upkeep.begin()
    for _ in range(6000):
        clock.at += 0.01
        leader.upkeep.work(0.01)
    assert 4 <= leader.asked <= 6


def test_without_a_retention_nothing_is_ever_asked(clock: Clock, execute: Execute) -> None:
    leader = Leader(execute, keep=None)
    leader.upkeep.begin()
    clock.at += 1e9
    assert leader.upkeep.work(7.0) == 7.0
    assert leader.asked == 0


def test_a_new_leadership_begins_from_the_oldest_again(clock: Clock, database: Database) -> None:
    for ago in range(50, 44, -1):
        add_occurrence(database, ago)
    asked: list[dt.datetime] = []
    told: list[int] = []
    with executing(database) as execute:

        def remembered(query: bytes, parameters: Mapping[str, Any]) -> list[Any]:
            asked.append(parameters["finished_at"])
            return execute(query, {**parameters, "most": min(2, parameters["most"])})

        upkeep = retention.Upkeep(remembered, "pglock", "app", KEEP, told.append)
        upkeep.begin()
        clock.at += 30
        upkeep.work(300.0)
        upkeep.begin()
        clock.at += 30
        upkeep.work(300.0)
    assert [moment.year for moment in asked] == [1, 1]
    # The statements found fewer than they asked for, which ends a walk.
    assert told == [2, 2]
