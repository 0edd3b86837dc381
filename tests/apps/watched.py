"""One beat and one worker in a process that Sentry and OpenTelemetry watch; prints what they saw.

`python -m tests.apps.watched stock` has Celery's own scheduler, `pglock` ours. Their entries are
due once, at `APP_DUE`, and not again while they are watched.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
import time
from typing import Any

import celery
import celery.beat
import kombu
import psycopg
import sentry_sdk
import sentry_sdk.transport
from celery.contrib.testing.worker import start_worker
from celery.schedules import crontab
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sentry_sdk.integrations.celery import CeleryIntegration
from typing_extensions import override

from celery_pglock import LeaderScheduler, LockedTask, advisory_lock, bounds, checkins

DUE = dt.datetime.fromisoformat(os.environ["APP_DUE"])

seen: list[dict[str, Any]] = []


class Kept(sentry_sdk.transport.Transport):
    """Keeps check-ins instead of sending them."""

    @override
    def capture_envelope(self, envelope: Any) -> None:
        seen.extend(item.payload.json for item in envelope.items if item.type == "check_in")


app = celery.Celery("watched", broker="memory://", set_as_current=True)
app.conf.update(
    result_expires=None,
    worker_hijack_root_logger=False,
    pglock_database_url=os.environ["APP_DATABASE_URL"],
    beat_schedule={
        name: {
            "task": f"watched.{name}",
            "schedule": crontab(minute=str(DUE.minute), hour=str(DUE.hour)),
            "options": {"headers": {"own": 1}},
        }
        for name in sys.argv[2:]
    },
)


@app.task(name="watched.plain")
def plain() -> None:
    pass


@app.task(name="watched.fails")
def fails() -> None:
    msg = "it is to fail"
    raise RuntimeError(msg)


@app.task(name="watched.locked", base=LockedTask)
def locked() -> None:
    pass


@app.task(name="watched.skipped", base=LockedTask)
def skipped() -> None:
    msg = "it is not to run"
    raise AssertionError(msg)


@app.task(name="watched.again", base=LockedTask)
def again() -> None:
    pass


class Stock(celery.beat.Scheduler):
    """Celery's own; its entries are due when it starts."""

    @override
    def setup_schedule(self) -> None:
        super().setup_schedule()
        for entry in self.schedule.values():
            entry.last_run_at = DUE - dt.timedelta(minutes=1)


class Leader(LeaderScheduler):
    """Ours; its entries are due when it takes over."""

    @override
    def setup_schedule(self) -> None:
        super().setup_schedule()
        with psycopg.connect(os.environ["APP_DATABASE_URL"]) as connection:
            for name, entry in self.schedule.items():
                connection.execute(
                    "INSERT INTO pglock.beat_entries"
                    " (namespace, entry, task, schedule, anchor, next_due_at)"
                    " VALUES ('watched', %s, %s, %s, %s, %s)",
                    (
                        name,
                        entry.task,
                        bounds.canonical(entry, dt.UTC),
                        DUE - dt.timedelta(days=1),
                        DUE,
                    ),
                )


def break_once() -> None:
    """Have the broker refuse the first message of `again`, of which Sentry has been told."""
    send = kombu.Producer._publish  # noqa: SLF001
    refused: list[str] = []

    def publish(self: Any, body: Any, *args: Any, **kwargs: Any) -> Any:
        if not refused and "watched.again" in str(args):
            refused.append("once")
            msg = "refused"
            raise ConnectionResetError(msg)
        return send(self, body, *args, **kwargs)

    kombu.Producer._publish = publish  # type: ignore[method-assign]  # noqa: SLF001


def main(kind: str, names: list[str]) -> None:
    sentry_sdk.init(
        dsn="http://key@127.0.0.1:9/1",
        transport=Kept,
        default_integrations=False,
        integrations=[CeleryIntegration(monitor_beat_tasks=True)],
    )
    if "APP_UNWATCHED" in os.environ:
        # A control: nobody closes what Celery does not tell of.
        checkins._close = lambda *_: None  # noqa: SLF001
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    CeleryInstrumentor().instrument(tracer_provider=provider)  # type: ignore[no-untyped-call]
    break_once()
    ended: set[str] = set()
    celery.signals.task_postrun.connect(
        lambda sender, **_: ended.add(sender.name.partition(".")[2]), weak=False
    )
    scheduler = {"stock": Stock, "pglock": Leader}[kind](app)
    with (
        advisory_lock("watched.skipped", app=app),
        start_worker(app, pool="solo", perform_ping_check=False, loglevel="ERROR"),
    ):
        deadline = time.monotonic() + 30
        while not ended >= set(names):
            assert time.monotonic() < deadline, ended
            scheduler.tick()
            time.sleep(0.05)
        scheduler.close()
    told = [
        {
            "name": span.name,
            "kind": span.kind.name,
            "state": (span.attributes or {}).get("celery.state"),
            "status": span.status.status_code.name,
            "trace": format(span.context.trace_id, "x"),
        }
        for span in spans.get_finished_spans()
    ]
    print(json.dumps({"checkins": seen, "spans": told}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
