"""The page of evidence: what many runs have shown, with n, as tables and plots.

The figures of each run are kept in a file beside the page, by seed; the page is written from all
of them, so that it says what the file says.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from tests.chaos import checker, conductor, controls
from tests.support.processes import REPOSITORY

PAGE: Final = REPOSITORY / "docs" / "explanation" / "evidence.md"
FIGURES: Final = PAGE.with_suffix(".json")

# Lateness is kept as counts: a run has thousands of occurrences.
BINS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)

Run = dict[str, Any]


def figures(
    seed: int,
    result: conductor.Performance,
    verdict: checker.Verdict,
    outcomes: Sequence[controls.Outcome],
) -> Run:
    """Return what is kept of a run."""
    return {
        "seed": seed,
        "seconds": round(result.seconds),
        "machine": f"{os.cpu_count()} cores, Linux {platform.release()}",
        "python": platform.python_version(),
        "celery": version("celery"),
        "psycopg": version("psycopg"),
        "faults": dict(sorted(verdict.faults.items())),
        "fallen": len(result.fallen),
        "periods": verdict.periods,
        "runs": verdict.runs,
        "doubled": verdict.count("doubled"),
        "lost": verdict.count("lost"),
        "overlaps": verdict.count("overlap"),
        "other": len(verdict.findings) - verdict.count("doubled", "lost", "overlap"),
        "outcomes": dict(sorted(verdict.outcomes.items())),
        "deaths": dict(sorted(verdict.deaths.items())),
        "explained": [round(overlap.seconds, 3) for overlap in verdict.overlaps],
        "takeovers": [
            [takeover.fault, round(takeover.seconds, 3)]
            for takeover in verdict.takeovers
            if takeover.clean
        ],
        "lateness": _counted(verdict.lateness),
        "controls": {outcome.name: outcome.proves for outcome in outcomes},
    }


def record(run: Run) -> None:
    """Keep the figures of a run, in the place of those of its seed, and write the page anew."""
    kept: list[Run] = json.loads(FIGURES.read_text()) if FIGURES.exists() else []
    runs = sorted(
        [*(other for other in kept if other["seed"] != run["seed"]), run],
        key=lambda other: int(other["seed"]),
    )
    FIGURES.write_text(json.dumps(runs, indent=1) + "\n")
    PAGE.write_text(page(runs))
    _plot(runs)


def bound(n: int) -> float:
    """Return below which rate something lies, with 95 %, that was seen in none of n cases."""
    return float(1 - 0.05 ** (1 / n)) if n else 1.0


def page(runs: Sequence[Run]) -> str:
    """Return the page, as it is in the documentation."""
    total = {name: sum(run[name] for run in runs) for name in ("periods", "doubled", "lost")}
    faults = _added(run["faults"] for run in runs)
    overlaps = sum(run["overlaps"] for run in runs)
    other = sum(run["other"] for run in runs)
    explained = [seconds for run in runs for seconds in run["explained"]]
    first = runs[0]
    return f"""# The evidence

`make chaos` starts three beats, three workers and their servers as real processes, hurts them for
minutes by a plan that is drawn from a seed, and has a checker judge the history that they leave
(`tests/chaos/`). This page is written by `make chaos RECORD=1`, from the figures of {_many(runs)}
({first["machine"]}; Python {first["python"]}, Celery {first["celery"]}, psycopg {first["psycopg"]}).

| | found | of | with 95 % less than |
| --- | --- | --- | --- |
| periods done twice | {total["doubled"]} | {total["periods"]} | {_rate(total["doubled"], total["periods"])} |
| periods lost | {total["lost"]} | {total["periods"]} | {_rate(total["lost"], total["periods"])} |
| overlaps that nothing explains | {overlaps} | {sum(run["runs"] for run in runs)} runs | {_rate(overlaps, sum(run["runs"] for run in runs))} |
| anything else that does not hold | {other} | {faults.total()} faults | {_rate(other, faults.total())} |

"Never" cannot be measured: the last column is the rate that n cases without one still allow.

## By seed

| seed | faults | periods | runs | doubled | lost | overlaps | controls | seconds |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
{_lines(_by_seed(run) for run in runs)}

## What was done

| fault | times |
| --- | --- |
{_lines(f"| {fault} | {count} |" for fault, count in faults.most_common())}

"Ended by itself" are workers that ended when their broker did, by an error in Celery's transport
for Redis; they were started again, as a service manager does.

## What became of the periods

| outcome | periods |
| --- | --- |
{_lines(f"| {name} | {count} |" for name, count in _added(run["outcomes"] for run in runs).most_common())}

Every period that is not `done` has a fault that explains it, and its row says why.
{_deaths(runs)}

## Overlaps after the loss of a session

A run whose session is ended goes on until it notices, and the next one may begin: that is
promised to be short, and not that it cannot be. {_overlapping(explained)}

## How long nobody led

Only faults during which nothing else kept beats from leading. (`pglock_leader_lease` was 4 s,
and the machine was kept busy.)

| fault | n | median | 95 % | longest |
| --- | --- | --- | --- | --- |
{_lines(_takeovers(runs))}

![Seconds until there was a leader again](evidence-takeovers.svg)

## Lateness

![Seconds after the due instant at which each occurrence was sent](evidence-lateness.svg)

## The controls

The checker has to find what each rule is for when the rule is taken away, and nothing when it is
in its place.

| without | caught in |
| --- | --- |
{_lines(_controls(runs))}
"""


def _many(runs: Sequence[Run]) -> str:
    return f"{len(runs)} runs" if len(runs) > 1 else "one run"


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def _rate(found: int, of: int) -> str:
    return "(found)" if found else f"{100 * bound(of):.2g} %"


def _added(counts: Iterable[dict[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return total


def _by_seed(run: Run) -> str:
    caught = sum(run["controls"].values())
    return (
        f"| {run['seed']} | {sum(run['faults'].values())} | {run['periods']} | {run['runs']}"
        f" | {run['doubled']} | {run['lost']} | {run['overlaps']}"
        f" | {caught}/{len(run['controls'])} | {run['seconds']} |"
    )


def _deaths(runs: Sequence[Run]) -> str:
    deaths = _added(run["deaths"] for run in runs)
    return (
        f"Of all runs {deaths['killed']} were killed at work, and {deaths['session lost']} lost"
        " their session."
    )


def _overlapping(seconds: Sequence[float]) -> str:
    if not seconds:
        return "There was none."
    return f"There were {len(seconds)}; the longest took {max(seconds):.2f} s."


def _by_fault(runs: Sequence[Run]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for run in runs:
        for fault, seconds in run["takeovers"]:
            found.setdefault(fault, []).append(seconds)
    return found


def _takeovers(runs: Sequence[Run]) -> Iterable[str]:
    for fault, seconds in sorted(_by_fault(runs).items()):
        slow = statistics.quantiles([*seconds, *seconds], n=20)[-1]
        yield (
            f"| {fault} | {len(seconds)} | {statistics.median(seconds):.2f} s | {slow:.2f} s"
            f" | {max(seconds):.2f} s |"
        )


def _controls(runs: Sequence[Run]) -> Iterable[str]:
    for control in controls.CONTROLS:
        played = [run["controls"][control.name] for run in runs if control.name in run["controls"]]
        yield f"| {control.name} | {sum(played)} of {len(played)} |"


def _counted(lateness: Iterable[float]) -> list[int]:
    counts = [0] * (len(BINS) + 1)
    for late in lateness:
        counts[sum(late > limit for limit in BINS)] += 1
    return counts


def _plot(runs: Sequence[Run]) -> None:
    # Only who writes the page needs it.
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "celery-pglock", "font.size": 9})
    from matplotlib import pyplot as plt

    taken = sorted(_by_fault(runs).items())
    figure, axes = plt.subplots(figsize=(7, 0.6 + 0.5 * max(1, len(taken))))
    if taken:
        axes.boxplot([seconds for _, seconds in taken], orientation="horizontal")
        axes.set_yticks(range(1, len(taken) + 1), [fault for fault, _ in taken])
    axes.set_xlabel("seconds without a leader")
    _save(figure, "takeovers")
    counts = [sum(column) for column in zip(*(run["lateness"] for run in runs), strict=True)]
    figure, axes = plt.subplots(figsize=(7, 2.8))
    names = [*(f"{1000 * limit:g} ms" if limit < 1 else f"{limit:g} s" for limit in BINS), "more"]
    axes.bar(range(len(counts)), counts)
    axes.set_xticks(range(len(counts)), names, rotation=45)
    axes.set_yscale("symlog")
    axes.set_xlabel("sent so long after it was due, at most")
    axes.set_ylabel("occurrences")
    _save(figure, "lateness")


def _save(figure: Any, name: str) -> None:
    from matplotlib import pyplot as plt

    figure.tight_layout()
    path = PAGE.with_name(f"evidence-{name}.svg")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    # Its lines end in spaces, which editors and checks remove.
    _strip(path)


def _strip(path: Path) -> None:
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n")
