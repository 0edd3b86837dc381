"""The Celery application of the demonstration: the job that everybody fears.

Each period it writes one invoice for each customer. It does so slowly, is killed in the
middle, delivered again, and sent twice; and there is no constraint in the table to save it.
The environment says where the servers are and whether the job is guarded.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

import celery
import psycopg
from celery import signals

from celery_pglock import LockedTask, current_run
from celery_pglock.demo import books, feed, redelivery

DATABASE: Final = "PGLOCK_DEMO_DATABASE_URL"
BROKER: Final = "PGLOCK_DEMO_BROKER_URL"
FEED: Final = "PGLOCK_DEMO_FEED"
NAME: Final = "PGLOCK_DEMO_NAME"
UNGUARDED: Final = "PGLOCK_DEMO_UNGUARDED"

NAMESPACE: Final = "demo"
ENTRY: Final = "invoices"
TASK: Final = "invoices"

# A message whose worker was killed is delivered again by the other one after 4 s. These are
# kombu's options for Redis; its own defaults take an hour and look every 100 s. A worker looks
# under a lock in Redis, and one that is killed meanwhile leaves it behind, by default for 300 s
# in which nobody looks. Two that look at once do no harm: each message is moved in a transaction.
TRANSPORT: Final = {
    "visibility_timeout": 4,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    "unacked_mutex_expire": 1,
}
# A worker that is killed between taking a message from Redis and writing down that it has it takes
# the message with it; no option of kombu's helps. The leader misses it after so many seconds.
MISSED_AFTER: Final = 6.0
_PR_SET_PDEATHSIG: Final = 1

redelivery.look_each_second()

_url = os.environ.get(DATABASE, "")
_name = os.environ.get(NAME, "demo")

app = celery.Celery(NAMESPACE, broker=os.environ.get(BROKER))
app.conf.update(
    beat_schedule={ENTRY: {"task": TASK, "schedule": books.EVERY}},
    broker_connection_retry_on_startup=True,
    broker_transport_options=TRANSPORT,
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
    pglock_database_url=_url or None,
    pglock_rescue_sent_after=MISSED_AFTER,
    pglock_rescue_lost_after=MISSED_AFTER,
)


def guarded(self: Any) -> None:
    """Write the period's invoices in the transaction that is the lock."""
    run = current_run()
    period = run.due
    if period is None:  # a call by hand has no due instant
        period = books.by_the_clock(time.time())
    books.begin(_url, period, str(self.request.id), _name)
    for customer in range(1, books.CUSTOMERS + 1):
        run.connection.execute(
            books.INVOICE, {"period": period, "customer": customer, "worker": _name}
        )
        time.sleep(books.WRITING / books.CUSTOMERS)


def unguarded(self: Any) -> None:
    """Write the invoices of the period that it is by the clock, each on its own."""
    period = books.by_the_clock(time.time())
    books.begin(_url, period, str(self.request.id), _name)
    with psycopg.connect(_url, autocommit=True) as connection:
        for customer in range(1, books.CUSTOMERS + 1):
            connection.execute(
                "INSERT INTO demo.invoices (period, customer, worker) VALUES (%s, %s, %s)",
                (period, customer, _name),
            )
            time.sleep(books.WRITING / books.CUSTOMERS)


# Late acknowledgement is what anybody adds who wants no invoice lost when a worker dies.
if os.environ.get(UNGUARDED):
    app.task(base=celery.Task, name=TASK, bind=True, acks_late=True, reject_on_worker_lost=True)(
        unguarded
    )
else:
    app.task(
        base=LockedTask,
        name=TASK,
        bind=True,
        acks_late=True,
        reject_on_worker_lost=True,
        lock_level="transaction",
        # Every period has to be billed. A period that was killed comes again while a later one
        # is being written; with the default, "skip", one of the two would be left out.
        lock_conflict="postpone",
        # The default gives a period up when more than three attempts have died, lest a job that
        # kills its worker go on for ever. Here it is the demonstration that kills.
        max_crash_retries=20,
    )(guarded)

if os.environ.get(FEED):
    _feed = feed.Writer(Path(os.environ[FEED]), _name)
    logging.getLogger("celery_pglock").addHandler(_feed)

    def _tell_ready(**_: object) -> None:
        _feed.write("is ready", event="worker_ready")

    signals.worker_ready.connect(_tell_ready, weak=False)

_main_pid = os.getpid()


def _die_with_worker(**_: object) -> None:
    # The pool's processes outlive a worker that is killed, and would go on after the end of
    # the demonstration. The kernel ends them; elsewhere than on Linux they may stay.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != _main_pid:
            os.kill(os.getpid(), signal.SIGKILL)


signals.worker_process_init.connect(_die_with_worker, weak=False)
