"""`make bench`: measure celery-pglock beside its peers, and write the page about performance."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, NoReturn

import psycopg
import redis

from celery_pglock.demo.servers import PostgresServer, ValkeyServer
from tests.benchmarks import (
    beats,
    claims,
    deliveries,
    failover,
    guards,
    limits,
    page,
    server_costs,
)
from tests.benchmarks.measuring import Figures, Ground

PARTS: Final[dict[str, dict[str, Callable[[Ground], Figures]]]] = {
    "a": {"guards": guards.measure, "deliveries": deliveries.measure},
    "b": {"beats": beats.measure},
    "c": {"failover": failover.measure},
    "d": {"claims": claims.measure},
    "e": {"server": server_costs.measure},
}
PACKAGES: Final = (
    "celery",
    "kombu",
    "psycopg",
    "sqlalchemy",
    "redis",
    "celery-once",
    "celery-redbeat",
    "celery-singleton",
    "django",
    "django-celery-beat",
)
# Long histories are written and deleted; otherwise the server is as it comes.
SETTINGS: Final = {"max_wal_size": "4GB"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for, and write the page."""
    options = _options(arguments)
    began = time.monotonic()
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed

    def say(sentence: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {sentence}", flush=True)

    say(f"seed {seed}")
    with _servers(options.url) as (server, redis_url):
        ground = Ground(
            server=server,
            redis=redis_url,
            quick=options.quick,
            random=random.Random(seed),  # noqa: S311 - not for secrets
            say=say,
        )
        # Of a quick run nothing is kept beside what has been measured properly.
        parts: Figures = {} if options.quick else page.kept(options.page)["parts"]
        for letter in options.only:
            for name, measure in PARTS[letter].items():
                parts[name] = measure(ground)
                # After each part: what has been measured is not lost with one that fails.
                _write(options, seed, _where(server, redis_url), parts)
    for verdict in limits.verdicts(parts):
        state = "met" if verdict.met else "NOT met"
        say(f"{state}: {verdict.what}: {verdict.ratio:.2f} ({verdict.sense} {verdict.limit:g})")
    say(f"written: {options.page}")
    return 0


def _write(options: argparse.Namespace, seed: int, where: dict[str, str], parts: Figures) -> None:
    options.page.parent.mkdir(parents=True, exist_ok=True)
    page.write({"seed": seed, "quick": options.quick, "where": where, "parts": parts}, options.page)


@contextlib.contextmanager
def _servers(url: str | None) -> Iterator[tuple[str, str]]:
    with contextlib.ExitStack() as stack:
        server = url or stack.enter_context(PostgresServer(SETTINGS)).url()
        valkey = stack.enter_context(ValkeyServer())
        yield server, valkey.url().rpartition("/")[0]


def _where(server: str, redis_url: str) -> dict[str, str]:
    """Return on what all this was measured."""
    with psycopg.connect(server) as connection:
        postgres = connection.info.parameter_status("server_version") or "?"
    with contextlib.closing(redis.Redis.from_url(redis_url)) as client:
        told = client.info("server")
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "Python": platform.python_version(),
        "PostgreSQL": postgres,
        "Valkey": str(told.get("valkey_version") or told["redis_version"]),
        **{name: _version(name) for name in PACKAGES},
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "?"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument(
        "--only", type=_letters, default=list(PARTS), help="parts, e.g. a,d (default: all)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="everything small, in less than two minutes"
    )
    parser.add_argument("--seed", type=int, help="of the order of turns")
    parser.add_argument(
        "--url", help="a superuser's libpq URL; by default a PostgreSQL is started for this"
    )
    parser.add_argument("--page", type=Path, help="where the page is written")
    options = parser.parse_args(arguments)
    if options.page is None:
        options.page = page.QUICK_PAGE if options.quick else page.PAGE
    return options


def _letters(text: str) -> list[str]:
    letters = text.split(",")
    if unknown := [letter for letter in letters if letter not in PARTS]:
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(unknown)}")
    return letters


def _end(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main())
