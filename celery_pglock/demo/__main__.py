"""``python -m celery_pglock.demo``: two beats, two workers, kills, and a verdict.

Exit codes: 0 every period was billed once; 1 it was not; 2 it could not be played.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
from pathlib import Path
from typing import NoReturn

CANNOT = 2
_SHORTEST, _LONGEST = 10.0, 3600.0


def main() -> int:
    """Play it once and return the exit code."""
    options = _options()
    signal.signal(signal.SIGTERM, _end)
    try:
        return _play(options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _play(options: argparse.Namespace) -> int:
    if sys.platform not in ("linux", "darwin"):
        return _cannot(f"The demonstration needs Linux or macOS, and this is {sys.platform}.")
    try:
        # Here and not above: the sentence below is friendlier than a traceback.
        from celery_pglock.demo import cast, performance, plot, screen, servers
    except ImportError as error:
        return _cannot(
            f"The demonstration needs {error.name or error}, which is not installed: "
            "run pip install 'celery-pglock[demo]'."
        )
    seed = random.randrange(1_000_000) if options.seed is None else options.seed  # noqa: S311
    guarded = not options.unguarded
    show = screen.Screen(seed, guarded=guarded)
    faults = plot.draw(seed, options.seconds)
    try:
        with cast.Cast(guarded=guarded, keep=options.logs) as company, show.live():
            result = performance.Performance(company, faults, options.seconds, show).play()
    except (servers.BinariesNotFoundError, servers.ServerError) as error:
        return _cannot(str(error))
    show.close(result)
    return 0 if result.verdict.count.right else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m celery_pglock.demo", description=__doc__)
    parser.add_argument(
        "--unguarded", action="store_true", help="plain tasks and two stock beats: the control"
    )
    parser.add_argument("--seed", type=int, help="repeat what was killed, and when")
    parser.add_argument(
        "--seconds", type=_seconds, default=30.0, help="how long it plays (default 30)"
    )
    parser.add_argument("--logs", type=Path, help="keep the logs in this directory")
    return parser.parse_args()


def _seconds(text: str) -> float:
    seconds = float(text)
    if not _SHORTEST <= seconds <= _LONGEST:
        raise argparse.ArgumentTypeError(f"from {_SHORTEST:g} to {_LONGEST:g}")
    return seconds


def _end(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def _cannot(sentence: str) -> int:
    print(sentence, file=sys.stderr)  # noqa: T201 - rich may be what is missing
    return CANNOT


if __name__ == "__main__":
    sys.exit(main())
