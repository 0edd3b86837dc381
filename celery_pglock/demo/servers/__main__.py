"""``python -m celery_pglock.demo.servers``: a PostgreSQL and a broker to try things out with.

They run until this process ends, and nothing that they hold is kept. What it prints is the two
variables by which other terminals find them.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from typing import NoReturn

CANNOT = 2


def main() -> int:
    """Run the servers until Ctrl+C or SIGTERM and return the exit code."""
    argparse.ArgumentParser(
        prog="python -m celery_pglock.demo.servers", description=__doc__
    ).parse_args()
    signal.signal(signal.SIGTERM, _end)
    try:
        return _serve()
    except KeyboardInterrupt:
        return 0


def _serve() -> int:
    # Here and not above, so that a signal in between is answered.
    from celery_pglock.demo import servers

    try:
        with servers.PostgresServer() as postgres, servers.ValkeyServer() as valkey:
            _say("PostgreSQL and a broker are running. In each other terminal:")
            _say(f"export DATABASE_URL={postgres.url()}")
            _say(f"export BROKER_URL={valkey.url()}")
            _say("Ctrl+C ends them; what they hold is not kept.")
            threading.Event().wait()
    except (servers.BinariesNotFoundError, servers.ServerError) as error:
        print(error, file=sys.stderr)  # noqa: T201 - for people
        return CANNOT
    return 0


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - what it is for


def _end(*_: object) -> NoReturn:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
