"""How late a leader sends what is due each second, and whether that grows.

`python -m tests.benchmarks.lateness` lets a beat lead for ten minutes and compares when each
message was recorded as sent with when it was due, both by the server's clock.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time

import psycopg

from celery_pglock import migrating
from celery_pglock.demo.servers import ValkeyServer
from tests.benchmarks.measuring import SERVER, own_database, quantile


def lateness(url: str, broker: str, seconds: float) -> list[float]:
    """Return, in seconds and in their order, how late each occurrence was sent."""
    given = {
        "APP_DATABASE_URL": url,
        "APP_BROKER_URL": broker,
        "APP_NAMESPACE": "bench",
        "APP_QUEUE": "bench",
        "APP_ENTRIES": json.dumps({"each second": 1.0}),
    }
    command = [sys.executable, "-m", "celery", "-A", "tests.apps.beat_app", "beat", "-S", "pglock"]
    with subprocess.Popen(command, env={**os.environ, **given}) as beat:
        try:
            time.sleep(seconds)
        finally:
            beat.send_signal(signal.SIGTERM)
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "select extract(epoch from sent_at - due_at)::float8 from pglock.job_runs"
            " where sent_at is not null order by due_at"
        ).fetchall()
    return [late for (late,) in rows]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.lateness")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--url", default=SERVER, help="of a role that may create a database")
    orders = parser.parse_args()
    with ValkeyServer() as valkey, own_database(orders.url) as url:
        migrating.migrate(url)
        times = lateness(url, valkey.url(), orders.seconds)
    tenth = max(1, len(times) // 10)
    print(f"\n{len(times)} occurrences of an entry that is due each second, late by (ms)")
    print(f"{'p50':>8}{'p95':>8}{'p99':>8}{'max':>8}{'p50 first tenth':>18}{'p50 last tenth':>18}")
    figures = [quantile(times, percent) for percent in (50, 95, 99)]
    figures.append(max(times))
    print("".join(f"{figure * 1e3:>8.1f}" for figure in figures), end="")
    for part in (times[:tenth], times[-tenth:]):
        print(f"{statistics.median(part) * 1e3:>18.1f}", end="")
    print()


if __name__ == "__main__":
    main()
