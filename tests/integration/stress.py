"""One claimer of the stress test, a process of its own; `test_claim_stress` starts many."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import random
import socket
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import psycopg

from celery_pglock import attempts, claims, execution, keys, ledger, sessions, stacks

SIDE_TABLE = """
create sequence moments;
create table trail (
    moment bigint not null default nextval('moments'), what text not null, period text not null,
    name text not null, claim uuid not null);
create table effects (period text not null, claim uuid not null)
"""
NAMES = [f"name-{number}" for number in range(8)]


class Died(BaseException):
    """Stands for the end of the process: nothing is recorded."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What a claimer is to do.

    Attributes:
        key_space: normally the same for all; the control gives each claimer its own run locks.
    """

    url: str
    level: sessions.Level
    periods: int
    seed: int
    death_rate: float
    key_space: str = "stress"


class Claimer:
    """Claims every period until it is closed, and dies now and then on the way."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.random = random.Random(orders.seed)  # noqa: S311 - not for secrets
        self.counts: collections.Counter[str] = collections.Counter()
        self.side = psycopg.connect(orders.url, autocommit=True)
        self.plan = sessions.Plan(
            target=orders.url, level=orders.level, application=f"pglock:{orders.seed}"
        )
        self.ledger = ledger.Ledger()

    def run(self) -> dict[str, int]:
        attempt = self.attempts()
        open_periods = list(range(self.orders.periods))
        while open_periods:
            still_open = [period for period in open_periods if not attempt(self.work(period))]
            if len(still_open) == len(open_periods):
                time.sleep(0.05)  # others are at work on what is left, or have just died
            open_periods = still_open
        self.side.close()
        return dict(self.counts)

    def work(self, period: int) -> claims.Work:
        name = self.random.choice(NAMES)
        label = f"{period:05}"
        return claims.Work(
            job="stress:job",
            period=label,
            name=name,
            name_key=keys.from_name("stress", "task", name),
            run_key=keys.of_run(self.orders.key_space, "stress:job", label),
            task="stress",
            node=str(os.getpid()),
            max_lost=1_000_000,
        )

    def attempts(self) -> Callable[[claims.Work], bool]:
        """Return what tries a period once, and says whether it is closed afterwards."""
        stack = stacks.Stack(self.plan)
        if self.orders.level == "session":
            return lambda work: self.attempt_at_session_level(stack, work)
        executor = execution.Executor(
            stack=stack, records=self.ledger, terms=attempts.Terms(classify=_reraise_death)
        )
        return lambda work: self.attempt_at_transaction_level(executor, work)

    def attempt_at_session_level(self, stack: stacks.Stack, work: claims.Work) -> bool:
        session = stack.take()
        claim = uuid.uuid4()
        answer = self.ledger.claim(session, work, claim=claim)
        closed = self.count(answer)
        if isinstance(answer, claims.Claimed):
            self.write("enter", work, claim)
            dies = self.dies()
            self.write("leave", work, claim)
            if dies:
                cut(session.connection)
                session.close()
                return False
            settled = self.ledger.settle(session, work, claim, "done")
            self.counts["settled" if settled else "lost"] += 1
            if self.random.random() < 0.2 and self.ledger.settle(session, work, claim, "failed"):
                self.counts["settled twice"] += 1
            closed = True
        stack.give(session)
        return closed

    def attempt_at_transaction_level(self, executor: execution.Executor, work: claims.Work) -> bool:
        claim = uuid.uuid4()  # of the side table

        def body(run: Any) -> None:
            self.counts["claimed"] += 1
            self.write("enter", work, claim)
            run.connection.exec_driver_sql(
                "insert into effects values (%s, %s)", (work.period, claim)
            )
            dies = self.dies()
            self.write("leave", work, claim)
            if dies:
                cut(run.connection.connection.driver_connection)
                raise Died

        try:
            answer = executor.execute(work, body)
        except Died:
            return False
        if isinstance(answer, claims.Refused):
            return self.count(answer)
        self.counts["settled"] += 1
        return True

    def count(self, answer: claims.Claimed | claims.Refused) -> bool:
        kind = "claimed" if isinstance(answer, claims.Claimed) else answer.kind
        self.counts[kind] += 1
        return kind == "closed"

    def dies(self) -> bool:
        dies = self.random.random() < self.orders.death_rate
        self.counts["died"] += dies
        return dies

    def write(self, what: Literal["enter", "leave"], work: claims.Work, claim: uuid.UUID) -> None:
        self.side.execute(
            "insert into trail (what, period, name, claim) values (%s, %s, %s, %s)",
            (what, work.period, work.name, claim),
        )


def cut(connection: psycopg.Connection[Any]) -> None:
    """End a connection as the kernel does for a process that was killed: without a word."""
    with socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)


def _reraise_death(error: BaseException) -> NoReturn:
    raise error


if __name__ == "__main__":
    print(json.dumps(Claimer(Orders(**json.loads(sys.argv[1]))).run()), flush=True)
