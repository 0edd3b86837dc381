"""The plots of the page about performance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks import beats, guards, tasks
from tests.benchmarks.measuring import Figures


def draw(parts: Figures, page: Path) -> None:
    """Draw what there are figures of, each in a file beside the page."""
    # Only who writes the page needs it.
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "celery-pglock", "font.size": 9})
    drawn: dict[str, tuple[str, Callable[[Any, Any], None]]] = {
        "guards": ("guards", _guards),
        "beats": ("bursts", _bursts),
        "claims": ("claims", _claims),
    }
    for part, (name, plot) in drawn.items():
        if part in parts:
            _drawn(page.with_name(f"{page.stem}-{name}.svg"), plot, parts[part])


def _drawn(path: Path, plot: Callable[[Any, Any], None], found: Figures) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3))
    plot(axes, found)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    # Its lines end in spaces, which editors and checks remove.
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n")


def _guards(axes: Any, found: Figures) -> None:
    names = [name for name in tasks.NAMES if name != tasks.PLAIN]
    bare = [guards.SELECTS, guards.WRITES]
    for offset, where in ((-0.2, "near"), (0.2, "no disk")):
        rows = [found[where][name] for name in (*bare, *names)]
        costs = [1e6 * (row["p50"] if row["guard"] is None else row["guard"]) for row in rows]
        label = "every commit waits for the disk" if where == "near" else "no commit waits"
        axes.barh([at + offset for at in range(len(costs))], costs, height=0.4, label=label)
    axes.set_yticks(range(len(bare) + len(names)), [*bare, *names])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("microseconds")
    axes.legend()


def _bursts(axes: Any, found: Figures) -> None:
    sizes = [int(size) for size in found["sizes"]]
    for kind in (beats.OURS, beats.LOOP, beats.REDBEAT, beats.STOCK, beats.DJANGO):
        rates = [found["sizes"][str(size)].get(kind, {}).get("rate") for size in sizes]
        axes.plot(sizes, [rate or float("nan") for rate in rates], marker="o", label=kind)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("entries that fall due at once")
    axes.set_ylabel("messages a second")
    axes.legend(fontsize=7)


def _claims(axes: Any, found: Figures) -> None:
    for size, row in found["throughput"].items():
        counts = [int(count) for count in row]
        rates = [row[str(count)]["rate"] for count in counts]
        axes.plot(counts, rates, marker="o", label=f"{int(size):,} rows")
    axes.set_xlabel("processes")
    axes.set_ylabel("runs a second")
    axes.set_ylim(bottom=0)
    axes.legend()
