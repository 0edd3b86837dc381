"""Any sequence of what can befall a row, on the real ledger, against a model of a page.

The model knows no SQL: which row is there, who holds which lock, and what each step should
answer. After each step the table and `pg_locks` are compared with it.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import os
import random
import uuid
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from psycopg.rows import namedtuple_row
from typing_extensions import override

from celery_pglock import claims, errors, ledger, reruns, retention, sessions, working_transactions
from tests.integration.workbench import Sessions, work
from tests.support.databases import Database
from tests.support.processes import eventually

EXAMPLES = int(os.environ.get("PGLOCK_TEST_EXAMPLES", "40"))
STEPS = 30
SHRINK = bool(os.environ.get("PGLOCK_TEST_SHRINK"))
KEEP = 30 * 86400.0
LEDGER = ledger.Ledger(keep=KEEP)
# Two jobs share a lock name.
JOBS = {"app:a": "shared", "app:b": "shared", "app:c": "own"}
NOW = dt.datetime.now(dt.UTC)

Place = tuple[str, int]


@dataclasses.dataclass
class Row:
    """A row of the model; ages are in days, `fresh` is within two seconds of its claim."""

    status: str
    attempts: int = 0
    lost: int = 0
    postponements: int = 0
    claim: uuid.UUID | None = None
    reason: str | None = None
    level: str | None = None
    fresh: bool = False
    age: int = 0

    @property
    def closed(self) -> bool:
        final = self.status in ("done", "skipped", "missed")
        return final or (self.status == "failed" and self.reason == "exhausted")

    @property
    def settled(self) -> bool:
        return self.status in ("done", "failed", "skipped", "missed")


@dataclasses.dataclass
class Holder:
    """A live process that has made a claim."""

    place: Place
    work: claims.Work
    claim: uuid.UUID
    session: sessions.Session
    transaction: working_transactions.WorkingTransaction | None = None

    @property
    def locked(self) -> bool:
        return self.session.level == "session" or self.transaction is not None


def machine(  # noqa: C901 - one class, whose methods are simple
    database: Database, opened: Sessions, counted: collections.Counter[str]
) -> type[RuleBasedStateMachine]:
    """Return the state machine over one database."""
    watching: Any = database.connect(row_factory=namedtuple_row)
    idle: dict[str, list[sessions.Session]] = {"session": [], "transaction": []}
    jobs = st.sampled_from(sorted(JOBS))
    numbers = st.integers(0, 3)

    class Life(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            watching.execute("delete from pglock.job_runs")
            self.rows: dict[Place, Row] = {}
            self.ages = [0]
            self.holders: list[Holder] = []
            self.dead: list[Holder] = []
            self.most: dict[Place, int] = {}

        @override
        def teardown(self) -> None:
            for holder in self.holders:
                holder.session.close()
            # The next example begins when the server has noticed.
            eventually(lambda: not self.locks(), interval=0.001)

        # --- what is asked of the real ledger ------------------------------------------------

        def work(self, place: Place, **more: Any) -> claims.Work:
            job, number = place
            # Later periods are due a moment later, whatever their age.
            due = NOW + dt.timedelta(milliseconds=number) - dt.timedelta(days=self.ages[number])
            return work(self.label(number), job=job, name=JOBS[job], due_at=due, **more)

        @staticmethod
        def label(number: int) -> str:
            return f"2026-01-01T00:00:{number:02}.000000+00:00"

        @staticmethod
        def session(level: Any) -> sessions.Session:
            return idle[level].pop() if idle[level] else opened.open(database.url, level)

        @staticmethod
        def back(session: sessions.Session) -> None:
            idle[session.level].append(session)

        def pick(self, job: str, number: int) -> Place:
            return job, number % len(self.ages)

        def opener(self, place: Place) -> bool:
            """Whether a row may be written: nobody does for a message that is stale."""
            return place in self.rows or not self.stale(place)

        def stale(self, place: Place) -> bool:
            return place not in self.rows and self.ages[place[1]] > 30

        def holds_run(self, place: Place) -> bool:
            return any(h.locked and h.place == place for h in self.holders)

        def holds_name(self, place: Place) -> bool:
            return any(h.locked and JOBS[h.place[0]] == JOBS[place[0]] for h in self.holders)

        def leave(self, holder: Holder) -> None:
            self.holders.remove(holder)
            self.back(holder.session)

        # --- steps ---------------------------------------------------------------------------

        @rule()
        def a_new_period_comes(self) -> None:
            if len(self.ages) < 4:
                self.ages.append(0)

        @rule(job=jobs, number=numbers)
        def the_beat_sends(self, job: str, number: int) -> None:
            place = self.pick(job, number)
            if not self.opener(place):
                return
            watching.execute(
                "insert into pglock.job_runs (job, period, due_at, status) values (%s, %s, %s,"
                " 'sent') on conflict do nothing",
                [job, self.label(place[1]), self.work(place).due_at],
            )
            self.rows.setdefault(place, Row("sent"))

        @rule(
            job=jobs,
            number=numbers,
            level=st.sampled_from(["session", "session", "transaction"]),
            max_lost=st.sampled_from([0, 1, 3]),
        )
        def a_message_claims(self, job: str, number: int, level: Any, max_lost: int) -> None:
            place = self.pick(job, number)
            wanted = self.work(place, max_lost=max_lost)
            expected = self.expect(place, max_lost)
            session, mine = self.session(level), uuid.uuid4()
            answer = LEDGER.claim(session, wanted, claim=mine)
            kind = answer.kind if isinstance(answer, claims.Refused) else "claimed"
            assert kind == expected
            counted[kind] += 1
            row = self.rows.get(place, Row("new"))
            if kind == "exhausted":
                row.lost += row.status == "running"
                row.status, row.reason, row.claim, row.age = "failed", "exhausted", mine, 0
            if not isinstance(answer, claims.Claimed):
                self.back(session)
                return
            row.lost += row.status == "running"
            row.attempts += 1
            opened_again = (row.reason or "").startswith("opened again")
            row.reason = row.reason if opened_again else None
            row.status, row.claim, row.level, row.fresh = "running", mine, level, True
            self.rows[place] = row
            assert (answer.attempt, answer.lost_attempts) == (row.attempts, row.lost)
            # A fencing token never comes twice, however often the row is opened again.
            assert answer.attempt > self.most.get(place, 0)
            self.most[place] = answer.attempt
            self.holders.append(Holder(place, wanted, mine, session))
            # The two seconds last until a step says that they are over.
            watching.execute(
                "update pglock.job_runs set started_at = now() + interval '1 h' where claim = %s",
                [mine],
            )

        def expect(self, place: Place, max_lost: int) -> str:
            row = self.rows.get(place)
            if row is not None and row.closed:
                return "closed"
            if self.stale(place):
                return "stale"
            # Without locks only a claim at transaction level is protected by its age.
            young = row is not None and row.status == "running" and row.fresh
            if self.holds_run(place) or (young and row and row.level == "transaction"):
                return "running"
            if self.holds_name(place):
                return "held"
            died = row is not None and row.status == "running"
            if row is not None and row.lost + died > max_lost:
                return "exhausted"
            return "claimed"

        @precondition(lambda self: any(not holder.locked for holder in self.holders))
        @rule(data=st.data())
        def a_transaction_begins(self, data: st.DataObject) -> None:
            holder = data.draw(st.sampled_from([h for h in self.holders if not h.locked]))
            row = self.rows.get(holder.place)
            mine = row is not None and row.claim == holder.claim and row.status == "running"
            expected = None
            if not mine:
                expected = "running"
            elif self.holds_name(holder.place):
                expected = "held"
            transaction = working_transactions.WorkingTransaction(
                holder.session, LEDGER, holder.work, holder.claim
            )
            assert transaction.begin() == expected
            counted[f"begin: {expected}"] += 1
            if expected is None:
                holder.transaction = transaction
                return
            LEDGER.give_back(holder.session, holder.work, holder.claim, "lock taken")
            if mine and row is not None:
                row.status, row.claim, row.reason, row.fresh = "sent", None, "lock taken", False
            self.leave(holder)

        @precondition(lambda self: self.holders)
        @rule(data=st.data(), status=st.sampled_from(["done", "failed", "retrying"]))
        def a_run_ends(self, data: st.DataObject, status: Any) -> None:
            holder = data.draw(st.sampled_from(self.holders))
            if holder.transaction is None:
                settled = LEDGER.settle(
                    holder.session, holder.work, holder.claim, status, reason=self.word(status)
                )
            elif status == "done":
                settled = holder.transaction.complete()
            else:
                settled = holder.transaction.abandon(status, self.word(status), None, None)
            assert settled == self.settle(holder, status)
            counted[f"settled: {status} {settled}"] += 1
            # Who holds the locks is never somebody else's victim.
            assert settled or not holder.locked
            self.leave(holder)

        @staticmethod
        def word(status: str) -> str | None:
            return None if status == "done" else "error"

        def settle(self, holder: Holder, status: str) -> bool:
            row = self.rows.get(holder.place)
            if row is None or row.claim != holder.claim or row.status != "running":
                return False
            kept = row.reason if (row.reason or "").startswith("opened again") else None
            # Until it is settled the rescue has to see that an operator has opened it again.
            told = (kept, self.word(status)) if status == "retrying" else (self.word(status), kept)
            row.status, row.reason, row.age = status, told[0] or told[1], 0
            row.fresh = False
            return True

        @precondition(lambda self: self.holders)
        @rule(data=st.data())
        def a_process_dies(self, data: st.DataObject) -> None:
            holder = data.draw(st.sampled_from(self.holders))
            pid = holder.session.pid
            holder.session.close()
            gone = "select from pg_stat_activity where pid = %s"
            eventually(lambda: not watching.execute(gone, [pid]).rowcount, interval=0.001)
            self.holders.remove(holder)
            self.dead.append(holder)
            counted["died"] += 1

        @precondition(lambda self: self.dead)
        @rule(data=st.data(), status=st.sampled_from(["done", "failed"]))
        def the_outcome_of_a_dead_run_comes_late(self, data: st.DataObject, status: Any) -> None:
            """Over a new session: recorded, unless somebody has taken the period over."""
            holder = data.draw(st.sampled_from(self.dead))
            session = self.session("transaction")
            reason = self.word(status)
            settled = LEDGER.settle(session, holder.work, holder.claim, status, reason=reason)
            assert settled == self.settle(holder, status)
            counted[f"late: {settled}"] += 1
            self.dead.remove(holder)
            self.back(session)

        @rule(job=jobs, number=numbers)
        def a_message_is_skipped(self, job: str, number: int) -> None:
            place = self.pick(job, number)
            if not self.opener(place):
                return
            session = self.session("session")
            LEDGER.skip(session, self.work(place), "overlap")
            self.back(session)
            row = self.rows.setdefault(place, Row("sent"))
            if row.status == "sent":
                row.status, row.reason, row.age = "skipped", "overlap", 0

        @rule(job=jobs, number=numbers, copy=st.integers(1, 3))
        def a_message_is_postponed(self, job: str, number: int, copy: int) -> None:
            place = self.pick(job, number)
            if not self.opener(place):
                return
            session = self.session("session")
            LEDGER.postpone(session, self.work(place), copy, "later")
            self.back(session)
            row = self.rows.get(place)
            if row is None:
                self.rows[place] = Row("sent", postponements=copy, reason="later")
            elif row.status in ("sent", "running", "retrying", "failed"):
                row.postponements = max(row.postponements, copy)

        @rule(job=jobs, number=numbers, force=st.booleans())
        def an_operator_opens_it_again(self, job: str, number: int, *, force: bool) -> None:
            place = self.pick(job, number)
            row = self.rows.get(place)
            refused = (
                row is None
                or (row.status == "running" and (row.fresh or self.holds_run(place)))
                or (row.status in ("done", "sent", "retrying") and not force)
            )
            opening = reruns.Reruns(watching, "pglock", "app")
            try:
                found = opening.reopen(
                    job, self.label(place[1]), task_id=uuid.uuid4(), who="ann", force=force
                )
            except errors.RerunRefused:
                assert refused
                counted["rerun: refused"] += 1
                return
            assert not refused
            assert row is not None
            assert found.status == row.status
            counted[f"rerun: {row.status}"] += 1
            word = " with --force" if row.status in ("done", "sent", "retrying") else ""
            was = row.status if row.reason is None else f"{row.status}: {row.reason}"
            row.reason = f"opened again{word} by ann; it was {was}"
            row.status, row.lost, row.postponements, row.claim = "sent", 0, 0, None
            row.fresh = False

        @rule()
        def seconds_pass(self) -> None:
            watching.execute(
                "update pglock.job_runs set started_at = clock_timestamp() - interval '3 s'"
                " where started_at > clock_timestamp() - interval '3 s'"
            )
            for row in self.rows.values():
                row.fresh = False

        @rule()
        def forty_days_pass(self) -> None:
            self.seconds_pass()
            watching.execute(
                "update pglock.job_runs set due_at = due_at - interval '40 days',"
                " started_at = started_at - interval '40 days',"
                " sent_at = sent_at - interval '40 days',"
                " finished_at = finished_at - interval '40 days'"
            )
            self.ages = [age + 40 for age in self.ages]
            for row in self.rows.values():
                row.age += 40

        @rule()
        def history_is_pruned(self) -> None:
            steps = retention.Pass(
                execute=lambda q, p: watching.execute(q, p).fetchall(),
                schema="pglock",
                namespace="app",
                keep=KEEP,
            )
            while not steps.ended:
                steps.step(3)
            gone = [
                (job, number)
                for (job, number), row in self.rows.items()
                if row.settled
                and row.age > 30
                and self.ages[number] > 30
                and any(j == job and n > number for j, n in self.rows)
            ]
            for place in gone:
                del self.rows[place]
            assert steps.removed == len(gone)
            counted["pruned"] += len(gone)

        # --- after each of them --------------------------------------------------------------

        @invariant()
        def the_table_is_as_the_model_says(self) -> None:
            found = watching.execute(
                "select job, period, status, attempts, lost_attempts, postponements, claim, reason"
                " from pglock.job_runs"
            ).fetchall()
            assert {tuple(row) for row in found} == {
                (
                    *(job, self.label(number), row.status, row.attempts, row.lost),
                    *(row.postponements, row.claim, row.reason),
                )
                for (job, number), row in self.rows.items()
            }

        @staticmethod
        def locks() -> set[tuple[int, int]]:
            found = watching.execute(
                "select (classid::bigint << 32) | objid::bigint, pid from pg_locks where locktype ="
                " 'advisory' and granted and database ="
                " (select oid from pg_database where datname = current_database())"
            ).fetchall()
            return {(key, pid) for key, pid in found}

        @invariant()
        def the_locks_are_as_the_model_says(self) -> None:
            assert self.locks() == {
                (key, holder.session.pid)
                for holder in self.holders
                if holder.locked
                for key in holder.work.lock_keys
            }

    return Life


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_row_lives_as_the_model_says(database: Database, lock_sessions: Sessions) -> None:
    counted: collections.Counter[str] = collections.Counter()
    # A few examples may all stay at the beginning of a life: go on until some have been further.
    # Each round needs a seed of its own, else it gives the examples of the first one again.
    first = random.getrandbits(32)
    rounds = 0
    while rounds < 20 and not (counted["claimed"] and counted["died"]):
        run_state_machine_as_test(
            seed(first + rounds)(machine(database, lock_sessions, counted)),
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                deadline=None,
                print_blob=True,
                database=None,
                # To make an example shorter takes minutes, and more where a clock has a part in it.
                phases=[Phase.generate, *([Phase.shrink] if SHRINK else [])],
                suppress_health_check=list(HealthCheck),
            ),
        )
        rounds += 1
    print(f"\n{rounds * EXAMPLES} examples, seed {first}: {dict(sorted(counted.items()))}")
    assert counted["claimed"]
    assert counted["died"]
