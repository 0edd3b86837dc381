"""``python -m tests.chaos``: play a plan of faults on real processes, and judge what is left.

The last line is the verdict; exit code 0 only if all holds.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from tests.chaos import checker, conductor, controls, plan, report, stage, without

_SHOWN: Final = 30

Say = Callable[[str], None]


def main() -> int:
    """Play it once and return the exit code."""
    options = _options()
    signal.signal(signal.SIGTERM, _end)
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    began = time.monotonic()

    def say(sentence: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {sentence}", flush=True)

    outcomes = _controls(say, options.controls) if options.controls != "none" else []
    caught = sum(outcome.proves for outcome in outcomes)
    if not options.faults:
        print(f"controls={caught}/{len(outcomes)}")
        return 0 if caught == len(outcomes) else 1
    result, verdict = _hurt(say, seed, options)
    for finding in verdict.findings[:_SHOWN]:
        say(f"{finding.kind}: {finding.text}")
    if options.record:
        report.record(report.figures(seed, result, verdict, outcomes))
    print(
        f"faults={result.done} periods={verdict.periods} doubled={verdict.count('doubled')}"
        f" lost={verdict.count('lost')} overlaps={verdict.count('overlap')}"
        f" controls={caught}/{len(outcomes)}"
    )
    return 0 if verdict.holds and result.settled and caught == len(outcomes) else 1


def _hurt(
    say: Say, seed: int, options: argparse.Namespace
) -> tuple[conductor.Performance, checker.Verdict]:
    with stage.Stage(conductor.ENTRIES, keep=options.keep) as there:
        impossible = conductor.people(there, options.without)
        if impossible:
            say(f"left out on this machine: {', '.join(impossible)}")
        faults = plan.draw(
            seed,
            options.faults,
            options.seconds,
            without=impossible,
            promotions=options.promotions,
        )
        result = conductor.Conductor(there, say).perform(faults, options.seconds)
        verdict = checker.check(result.evidence)
        if not verdict.holds:
            _keep(there, result, verdict)
            say(f"the logs, the histories and the ledger are in {there.keep}")
    return result, verdict


def _keep(there: stage.Stage, result: conductor.Performance, verdict: checker.Verdict) -> None:
    """Have what is needed to understand a finding outlive the stage."""
    there.keep = there.keep or Path(tempfile.mkdtemp(prefix="pglock-chaos-kept-"))
    for name, lines in (("findings", verdict.findings), ("ledger", result.evidence.rows)):
        (there.place / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))


def _controls(say: Say, chosen: str) -> list[controls.Outcome]:
    wanted = [control for control in controls.CONTROLS if chosen in ("all", control.name)]
    outcomes = []
    with stage.Stage(
        controls.ENTRIES, settings=controls.SETTINGS, far=False, clocks_off=False
    ) as there:
        for outcome in controls.play_all(there, wanted):
            say(f"control: {outcome.name}: {'caught' if outcome.proves else 'NOT caught'}")
            if not outcome.proves:
                say(f"without the rule: {outcome.found}; with it: {outcome.sound}")
            outcomes.append(outcome)
    return outcomes


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="repeat what is done, and when")
    parser.add_argument("--faults", type=int, default=640, help="how many (default 640)")
    parser.add_argument(
        "--seconds", type=float, default=420.0, help="within which time (default 420)"
    )
    parser.add_argument("--promotions", type=int, default=2, help="of standby servers (default 2)")
    parser.add_argument("--controls", default="all", help="'all', 'none', or the name of one")
    parser.add_argument(
        "--without",
        default="",
        choices=["", *without.rules()],
        help="have workers that lack a rule, to see a seed fail, and fail again",
    )
    parser.add_argument("--keep", type=Path, help="keep the logs and the histories here")
    parser.add_argument(
        "--record", action="store_true", help="write docs/explanation/evidence.md anew"
    )
    options = parser.parse_args()
    if options.without and options.record:
        parser.error("--record is for the package as it is: leave --without out")
    return options


def _end(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
