"""A bench: a database, a broker, a queue of its own, workers, and what they left behind."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import json
import os
import pwd
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import celery
import kombu
import redis
from celery.result import AsyncResult

from tests.apps import recording
from tests.support.databases import Database
from tests.support.processes import Process, Processes, eventually
from tests.support.requirements import require
from tests.support.servers import REDIS_DATABASES

NAMESPACE = "acceptance"
# With them Redis delivers again what has been worked on for 5 s; its own defaults look only
# every 100 s, and for 300 s not at all once a worker was killed while it looked.
FAST_REDELIVERY: dict[str, Any] = {
    "visibility_timeout": 5,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    "unacked_mutex_expire": 1,
}

# The fixture fresh_redis_url counts from below.
redis_database = itertools.count(REDIS_DATABASES // 2)


class Run(NamedTuple):
    """A row of `job_runs`."""

    job: str
    period: str
    status: str
    attempts: int
    lost_attempts: int
    postponements: int
    task_id: str | None
    entry: str | None
    reason: str | None
    error: str | None


class Note(NamedTuple):
    """What a worker left behind."""

    what: str
    detail: dict[str, Any]
    pid: int
    at: dt.datetime


class Bench:
    """Everything that a test with real workers needs.

    Attributes:
        database: the database, with tables for notes.
        processes: starts processes.
        broker: the URL of the broker.
        backend: the URL of the result backend, or None.
        queue: the name of the queue.
        transport_options: of the broker.
        app: an application that only sends, with nothing of celery-pglock in it.
        variables: further variables of the workers.
    """

    def __init__(
        self,
        database: Database,
        processes: Processes,
        *,
        broker: str,
        backend: str | None,
        transport_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.database = database
        self.processes = processes
        self.broker = broker
        self.backend = backend
        self.queue = f"pglock-test-{uuid.uuid4().hex[:12]}"
        self.transport_options = dict(transport_options or {})
        self._names = itertools.count(1)
        self._workers: list[Process] = []
        self.app = self._sender()
        self.variables: dict[str, str] = {}
        database.rows(recording.TABLES)

    def _sender(self) -> celery.Celery:
        app = celery.Celery(
            "sender", broker=self.broker, backend=self.backend, set_as_current=False
        )
        app.conf.update(
            task_default_queue=self.queue, broker_transport_options=self.transport_options
        )
        return app

    # --- processes ---------------------------------------------------------------------------

    def environment(self, **settings: Any) -> dict[str, str]:
        """Return the variables that configure the applications in `tests.apps`."""
        return {
            "APP_DATABASE_URL": self.database.url,
            "APP_BROKER_URL": self.broker,
            "APP_RESULT_BACKEND": self.backend or "",
            "APP_NAMESPACE": NAMESPACE,
            "APP_QUEUE": self.queue,
            "APP_TRANSPORT_OPTIONS": json.dumps(self.transport_options),
            "APP_SETTINGS": json.dumps(settings),
            **self.variables,
        }

    def start_worker(
        self,
        *arguments: str,
        concurrency: int = 2,
        pool: str = "prefork",
        app: str = "tests.apps.tasks",
        heartbeat: bool = False,
        **settings: Any,
    ) -> Process:
        """Start a worker; `expect` waits until it is ready.

        Without `-E` and heartbeats it has no events, and monitors cannot have it send any.
        """
        # Two workers of one name cannot share a RabbitMQ.
        name = f"worker{next(self._names)}-{self.queue[-6:]}"
        worker = self.processes.celery(
            app,
            "worker",
            f"--pool={pool}",
            f"--concurrency={concurrency}",
            f"--hostname={name}@%h",
            "--without-gossip",
            "--without-mingle",
            *(() if heartbeat else ("--without-heartbeat",)),
            "--loglevel=INFO",
            *arguments,
            env=self.environment(**settings),
            name=name,
        )
        self._workers.append(worker)
        return worker

    def worker(self, *arguments: str, **options: Any) -> Process:
        """Start a worker and wait until it takes messages."""
        (process,) = self.expect(self.start_worker(*arguments, **options))
        return process

    @staticmethod
    def expect(*workers: Process) -> tuple[Process, ...]:
        """Wait until workers take messages."""
        for worker in workers:
            worker.wait_for_line(r" ready\.$")
        return workers

    def script(self, text: str, *arguments: str) -> str:
        """Run a script with the applications configured; return what it printed."""
        process = self.processes.python("-c", text, *arguments, env=self.environment())
        assert process.wait() == 0, process.output()
        return process.output()

    def kill(self, pid: int) -> None:
        """Kill a process of one of the workers, and nothing else."""
        mine = [child for worker in self._workers for child in (worker.pid, *worker.children())]
        assert pid in mine, f"{pid} is none of {mine}"
        os.kill(pid, signal.SIGKILL)

    # --- messages ----------------------------------------------------------------------------

    def send(self, task: str, *args: object, **options: Any) -> AsyncResult[Any]:
        """Send a message; `options` as for `apply_async`, but `params` for keyword arguments."""
        params = options.pop("params", None)
        return self.app.send_task(task, args, params, **options)

    def step(self, task: str, *args: object, **params: object) -> Any:
        """Return a step of a chain, group or chord; it takes no result of an earlier one."""
        return self.app.signature(task, args=args, kwargs=params, immutable=True)

    @staticmethod
    def chain(*steps: Any) -> Any:
        """Send a chain; return the result of its last step."""
        return celery.chain(*steps).apply_async()

    @staticmethod
    def group(*steps: Any) -> Any:
        """Send a group; return its result."""
        return celery.group(*steps).apply_async()

    @staticmethod
    def chord(*header: Any, body: Any) -> Any:
        """Send a chord; return the result of its body, whose parent is that of the header."""
        return celery.chord(header)(body)

    def open_gate(self, name: str, value: str = "") -> None:
        """Let the bodies go on that wait at a gate."""
        self.database.rows(
            "INSERT INTO gates VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET value = %s",
            name,
            value,
            value,
        )

    @contextlib.contextmanager
    def held(self, key: str, task: str = "job", **options: Any) -> Iterator[AsyncResult[Any]]:
        """Have a run of `task` hold the lock of `key` for the length of the block."""
        gate = f"gate-{uuid.uuid4()}"
        result = self.send(task, key, params={"gate": gate}, **options)
        self.wait_for_notes("start", task_id=result.id)
        try:
            yield result
        finally:
            self.open_gate(gate)
            self.wait_for_notes("end", task_id=result.id)

    def messages(self) -> int:
        """Return how many messages the broker has: waiting and not acknowledged."""
        if self.broker.startswith("redis"):
            with contextlib.closing(redis.Redis.from_url(self.broker)) as client:
                return _count(client.llen(self.queue)) + _count(client.hlen("unacked"))
        listed = rabbitmqctl("list_queues", "name", "messages")
        return sum(int(count) for name, count in map(str.split, listed) if name == self.queue)

    def wait_for_delivery(self, task_id: str) -> None:
        """Wait until a worker has begun with a message, whatever will become of it."""
        self.wait_for_notes("delivered", task_id=task_id)

    # --- what was left behind ----------------------------------------------------------------

    def notes(self, what: str, **detail: object) -> list[Note]:
        """Return the notes of a kind whose detail is as given, the oldest first."""
        rows = self.database.ask(
            "SELECT what, detail, pid, at FROM notes WHERE what = %s AND detail @> %s::jsonb"
            " ORDER BY id",
            what,
            json.dumps(detail),
        )
        return [Note(*row) for row in rows]

    def wait_for_notes(
        self, what: str, *, count: int = 1, timeout: float = 15.0, **detail: object
    ) -> list[Note]:
        """Wait until there are so many such notes, and return them."""
        return eventually(
            lambda: found if len(found := self.notes(what, **detail)) >= count else [],
            timeout,
            f"{count} notes {what} {detail}",
        )

    def now(self) -> dt.datetime:
        """Return the database's clock, by which notes are dated."""
        ((moment,),) = self.database.ask("SELECT clock_timestamp()")
        assert isinstance(moment, dt.datetime)
        return moment

    def skips(self, **detail: object) -> list[Note]:
        """Return the signals that told of a skip."""
        return self.notes("signal", name="run_skipped", **detail)

    def runs(self, **columns: object) -> list[Run]:
        """Return the rows of `job_runs` whose columns are as given."""
        where = " AND ".join(["true", *(f"{name} = %s" for name in columns)])
        query = f"SELECT {', '.join(Run._fields)} FROM pglock.job_runs WHERE {where}"  # noqa: S608
        rows = self.database.ask(f"{query} ORDER BY job, period", *columns.values())
        return [Run(*row) for row in rows]

    def run(self, **columns: object) -> Run:
        """Return the one such row."""
        found = self.runs(**columns)
        assert len(found) == 1, found
        return found[0]

    def wait_for_run(self, status: str, *, timeout: float = 15.0, **columns: object) -> Run:
        """Wait until there is such a row with a status, and return it."""
        return eventually(
            lambda: self.runs(status=status, **columns), timeout, f"{columns} is {status}"
        )[0]

    def locks(self) -> list[dict[str, Any]]:
        """Return who holds advisory locks in the database."""
        query = (
            "SELECT l.pid, a.application_name, (l.classid::bigint << 32) | l.objid::bigint AS key"
            " FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
            " WHERE l.locktype = 'advisory' AND l.granted AND a.datname = current_database()"
            " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        columns = ("pid", "application_name", "key")
        return [dict(zip(columns, row, strict=True)) for row in self.database.ask(query)]

    def close(self) -> None:
        """Close what this process has open, and delete the queue."""
        if self.broker.startswith("amqp"):
            with kombu.Connection(self.broker) as connection:
                channel: Any = connection.default_channel
                channel.queue_delete(self.queue)
                channel.exchange_delete(self.queue)
        close_app(self.app)


def close_app(app: celery.Celery) -> None:
    """Close an application's connections to its broker and its result backend."""
    backend: Any = app.backend
    consumer = getattr(backend, "result_consumer", None)
    if consumer is not None:
        consumer.stop()
        # A result that is forgotten later would connect again to say so.
        consumer.cancel_for = lambda _: None
    client = vars(backend).get("client")
    if client is not None:
        client.connection_pool.disconnect()
    app.close()


def rabbitmqctl(*arguments: str) -> list[str]:
    """Run rabbitmqctl and return the lines that it prints; without the right to, skip the test."""
    program = shutil.which("rabbitmqctl", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    account = pwd.getpwuid(os.geteuid()).pw_name
    require(
        program is not None and account in ("root", "rabbitmq"),
        "rabbitmqctl, which only root or the user rabbitmq may run",
    )
    done = subprocess.run(
        [program or "", "--quiet", *arguments],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path("/"),
    )
    return [line for line in done.stdout.splitlines() if line]


def due(**ago: float) -> dt.datetime:
    """Return an instant in the past, to the second."""
    return dt.datetime.now(dt.UTC).replace(microsecond=0) - dt.timedelta(**ago)


def occurrence(entry: str, moment: dt.datetime) -> dict[str, str]:
    """Return the headers that a beat with a lock gives to the message of an occurrence."""
    return {
        "pglock_job": f"{NAMESPACE}:{entry}",
        "pglock_due": moment.isoformat(),
        "pglock_entry": entry,
    }


def label(moment: dt.datetime) -> str:
    """Return the period of an occurrence, written out here and not asked of the package."""
    return moment.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%f+00:00")


def _count(answer: Any) -> int:
    return int(answer)
