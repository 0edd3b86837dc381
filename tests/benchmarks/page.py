"""The page about performance, written from the figures in the file beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from tests.benchmarks import beats, claims, failover, guards, limits, tasks
from tests.benchmarks.measuring import Figures
from tests.support.processes import REPOSITORY

PAGE: Final = REPOSITORY / "docs" / "explanation" / "performance.md"
# Of a quick run, whose figures say nothing.
QUICK_PAGE: Final = REPOSITORY / "build" / "performance.md"


def write(figures: Figures, page: Path = PAGE) -> None:
    """Keep the figures beside the page, and write the page and its plots."""
    from tests.benchmarks import plots

    page.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    page.write_text(text(figures))
    plots.draw(figures["parts"], page)


def kept(page: Path = PAGE) -> Figures:
    """Return the figures that are kept beside the page, of parts that are not measured now."""
    file = page.with_suffix(".json")
    found: Figures = json.loads(file.read_text()) if file.exists() else {"parts": {}}
    return found


def text(figures: Figures) -> str:
    """Return the page."""
    return "\n".join(_lines(figures))


def _lines(figures: Figures) -> Iterator[str]:
    parts = figures["parts"]
    yield "# What it costs"
    yield ""
    yield (
        "`make bench` measures celery-pglock beside what people would use instead, all in one run"
        " and in turn, so that whatever else the machine does strikes all alike. This page is"
        " written by it, from the figures in `performance.json`."
    )
    yield ""
    yield from _table(
        ("where", "what"),
        ((name, str(value)) for name, value in figures["where"].items()),
    )
    yield "## Against the limits"
    yield ""
    yield (
        "Times depend on the machine, ratios less; so the limits that the project has set itself are"
        " ratios. A guarded run is two round trips, and around them about as much Python as Celery"
        " has around the body. Beside a server on the same machine that can be seen; over a network"
        " hardly."
    )
    if "guards" in parts:
        yield from _room(parts["guards"])
    yield ""
    yield from _table(
        ("ratio", "measured", "limit", ""),
        (
            (
                verdict.what,
                f"{verdict.ratio:.2f}",
                f"{verdict.sense} {verdict.limit:g}",
                "met" if verdict.met else "**not met**",
            )
            for verdict in limits.verdicts(parts)
        ),
    )
    sections: tuple[tuple[str, Callable[[Any], Iterator[str]]], ...] = (
        ("guards", _guards),
        ("deliveries", _deliveries),
        ("beats", _beats),
        ("failover", _failover),
        ("claims", _claims),
        ("server", _server),
    )
    for name, section in sections:
        if name in parts:
            yield from section(parts[name])


def _room(found: Figures) -> Iterator[str]:
    """Say how much of the limits the bare statements take."""

    def ratio(name: str, base: str, where: str = "near") -> str:
        return f"{found[where][name]['p50'] / found[where][base]['p50']:.2f}"

    yield ""
    yield (
        "How much room they leave for Python: of the first, a bare lock and unlock takes"
        f" {ratio(guards.LOCK_AND_UNLOCK, guards.SELECTS)}; of that of a run with ledger, two bare"
        f" writes of the same row {ratio(guards.SAME_WRITES, guards.WRITES)}, and of its round trips"
        f" {ratio(guards.WRITES, guards.SELECT, 'far')}. A refusal is the difference to a task that"
        f" raises `Ignore`, which takes Celery {_micro(found['near'][guards.IGNORED]['p50'])} µs."
    )


def _guards(found: Figures) -> Iterator[str]:
    yield "## A guarded run"
    yield ""
    yield (
        "A task is called as a worker's child calls it, without a broker. What a guard costs is the"
        " difference to the task without one, that of a refusal the difference to a task that raises"
        " `Ignore`; celery-once and celery-singleton take their locks"
        " where the message is sent, and that is in their figures. Times are in microseconds."
    )
    yield ""
    titles = {
        "near": "On one machine, every commit waits for the disk",
        "no disk": "The same with `synchronous_commit = off`",
        "far": f"The servers {1000 * found['round_trip']:g} ms away, there and back",
    }
    for where, title in titles.items():
        yield f"### {title}"
        yield ""
        trip = found[where][guards.SELECT]["p50"]
        yield from _table(
            ("", "n", "median", "99 %", "guard", "guard in round trips"),
            (
                (
                    name,
                    str(row["n"]),
                    _micro(row["p50"]),
                    _micro(row["p99"]),
                    "" if row["guard"] is None else _micro(row["guard"]),
                    "" if row["guard"] is None else f"{row['guard'] / trip:.1f}",
                )
                for name, row in found[where].items()
            ),
        )
    yield "![What a guard adds to a run](performance-guards.svg)"
    yield ""


def _deliveries(found: Figures) -> Iterator[str]:
    yield "## From the sender and back"
    yield ""
    yield (
        "A message through Redis, a worker with one process, and the result; each is sent when the"
        " result of the one before has come. Milliseconds."
    )
    yield ""
    yield from _table(
        ("guard", "n", "median", "99 %"),
        (
            (name, str(row["n"]), _milli(row["p50"]), _milli(row["p99"]))
            for name, row in ((name, found[name]) for name in tasks.NAMES)
        ),
    )


def _beats(found: Figures) -> Iterator[str]:
    yield "## Beats with many entries"
    yield ""
    yield (
        "Each scheduler has a process of its own, and its entries are each due once a day. A burst"
        f" is that all of them fall due at once; of {_cut(found['cut'])}, which send at one rate,"
        " it is cut short. The messages that the broker has then are counted. Memory is what the"
        " scheduler and its entries add to a process that has imported everything."
    )
    yield ""
    for size, of_size in found["sizes"].items():
        yield f"### {int(size):,} entries"
        yield ""
        yield from _table(
            ("", "first start", "start again", "idle tick, median", "99 %", "n", "messages/s",
             "rounds", "memory"),
            (_beat(kind, row) for kind, row in of_size.items()),
        )  # fmt: skip
    if found.get("rabbitmq"):
        yield f"### {found['compared']:,} entries, on RabbitMQ"
        yield ""
        yield from _table(
            ("", "messages/s", "rounds"),
            (
                (kind, f"{row['rate']:,.0f}", str(len(row["rates"])))
                for kind, row in found["rabbitmq"].items()
            ),
        )
    yield "![Messages a second in a burst](performance-bursts.svg)"
    yield ""


def _cut(cut: dict[str, float]) -> str:
    return " and ".join(f"{kind} ({seconds:g} s)" for kind, seconds in cut.items())


def _beat(kind: str, row: Figures) -> tuple[str, ...]:
    def seconds(value: float | None) -> str:
        return "too long" if value is None else f"{value:.2f} s"

    if kind == beats.LOOP:
        return (kind, "", "", "", "", "", f"{row['rate']:,.0f}", str(len(row["rates"])), "")
    idle = row["idle"] or {"n": 0, "p50": float("nan"), "p99": float("nan")}
    return (
        kind,
        seconds(row["first start"]),
        seconds(row["start"] and row["start"]["p50"]),
        f"{_micro(idle['p50'])} µs",
        f"{_micro(idle['p99'])} µs",
        str(idle["n"]),
        "" if row["rate"] is None else f"{row['rate']:,.0f}",
        str(len(row["rates"])),
        f"{row['memory'] / 1024:.1f} MiB",
    )


def _failover(found: Figures) -> Iterator[str]:
    yield "## After the leader was killed"
    yield ""
    yield (
        "Two beats, an entry that is due each second, SIGKILL for the leader at a random moment:"
        " how late the next message is."
    )
    yield ""
    rows = []
    for name, row in found.items():
        late = row["lateness"]
        for waited, expiry in zip(row["waited in vain"], row["lock still held for"], strict=True):
            rows.append(
                (
                    name,
                    "1",
                    f"nothing in {waited:g} s; its lock was held for {expiry:,.0f} s more",
                    "",
                )
            )
        if late:
            rows.append((name, str(late["n"]), f"{late['p50']:.2f} s", f"{late['max']:.2f} s"))
    yield from _table(("", "n", "median", "longest"), rows)
    fast = failover.CONTENDERS[failover.FAST].settings
    yield (
        "The fastest settings of redbeat that are safe for such an entry: "
        + ", ".join(f"`{name} = {value}`" for name, value in fast.items())
        + "."
    )
    yield ""


def _claims(found: Figures) -> Iterator[str]:
    yield "## Beside a long history"
    yield ""
    yield (
        f"Claims and settlements beside settled rows of {claims.JOBS} jobs, taken in turn;"
        " milliseconds, with `synchronous_commit = off`, because the disk would hide the"
        " difference."
    )
    yield ""
    yield from _table(
        ("rows", "size", "claim, median", "99 %", "settlement, median", "99 %", "n"),
        (
            (
                f"{int(size):,}",
                f"{found['sizes'][size] / 1024**2:,.0f} MiB",
                *(_milli(row[what][q]) for what in ("claim", "settle") for q in ("p50", "p99")),
                str(row["claim"]["n"]),
            )
            for size, row in found["claims"].items()
        ),
    )
    yield "Runs that so many processes claim and settle in a second:"
    yield ""
    counts = list(next(iter(found["throughput"].values())))
    least = min(found["throughput"], key=int)
    yield from _table(
        ("rows", *(f"{count} processes" if count != "1" else "1 process" for count in counts)),
        [
            *(
                (f"{int(size):,}", *(f"{row[count]['rate']:,}" for count in counts))
                for size, row in found["throughput"].items()
            ),
            (
                f"{int(least):,}, every commit waits for the disk",
                *(f"{found['durable'][least][count]['rate']:,}" for count in counts),
            ),
        ],
    )
    yield "The clean-up, in batches without a pause between them:"
    yield ""
    yield from _table(
        ("rows", "deleted", "rows/s", "a batch, median", "99 %"),
        (
            (
                f"{int(size):,}",
                f"{row['deleted']:,}",
                f"{row['rate']:,}",
                f"{_milli(row['batches']['p50'])} ms",
                f"{_milli(row['batches']['p99'])} ms",
            )
            for size, row in found["pruning"].items()
        ),
    )
    yield "![Runs a second by processes and rows](performance-claims.svg)"
    yield ""


def _server(found: Figures) -> Iterator[str]:
    yield "## What it is to the server"
    yield ""
    yield (
        f"Connections, and statements in {found['seconds']:g} s in which nothing is due, counted in"
        " the server's log."
    )
    yield ""
    yield from _table(
        ("", "connections", "statements a minute"),
        (
            (role, str(row["connections"]), f"{row['statements a minute']:g}")
            for role, row in found["idle"].items()
        ),
    )
    memory = found["memory"]
    yield (
        f"The server process of a session that holds locks has {memory['holder'] / 1024:.1f} MiB"
        f" for itself; of a bare connection, {memory['bare connection'] / 1024:.1f} MiB."
    )
    yield ""
    yield from _table(
        ("WAL of", "bytes"), ((name, f"{size:,}") for name, size in found["wal"].items())
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}" if seconds < 1e-4 else f"{seconds * 1e6:,.0f}"


def _milli(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}"
