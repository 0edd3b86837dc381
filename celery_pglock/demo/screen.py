"""The screen: a table that follows the play in a terminal, plain lines anywhere else."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime as dt
from collections.abc import Iterator
from typing import Final, Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from celery_pglock.demo import books, observer, outcome

Tone = Literal["told", "deed", "stage"]

_FEED_LINES: Final = 14
_STYLES: Final[dict[Tone, str]] = {"told": "", "deed": "bold red", "stage": "bold"}
_MARKS: Final[dict[Tone, str]] = {"told": " ", "deed": "!", "stage": "*"}


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """What there is to be seen at one moment.

    Attributes:
        elapsed: seconds since the beginning.
        people: name and condition of each beat and worker.
        holders: who holds a lock.
        tally: the invoices so far.
        now: the server's clock.
    """

    elapsed: float
    people: list[tuple[str, str]]
    holders: list[observer.Holder]
    tally: observer.Tally
    now: dt.datetime


class Screen:
    """Shows scenes and sentences.

    Args:
        seed: of the plot, shown so that it can be repeated.
        guarded: whether there are locks to show.
    """

    def __init__(self, seed: int, *, guarded: bool) -> None:
        self.console = Console(highlight=False)
        self._title = (
            f"celery-pglock demo, {'guarded' if guarded else 'unguarded'}, seed {seed}: "
            f"an invoice for each of {books.CUSTOMERS} customers every {books.EVERY:g} s"
        )
        self._guarded = guarded
        self._feed = collections.deque[Text](maxlen=_FEED_LINES)
        self._live: Live | None = None

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """In a terminal, keep one table up to date for the length of the block."""
        self.console.print(Text(self._title, style="bold"), soft_wrap=True)
        if not self.console.is_terminal:
            yield
            return
        with Live(console=self.console, auto_refresh=False, transient=True) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def say(self, elapsed: float, sentence: str, tone: Tone = "told") -> None:
        """Show a sentence in the feed, or print it where there is no terminal."""
        line = Text(f"{elapsed:5.1f} s {_MARKS[tone]} {sentence}", style=_STYLES[tone])
        self._feed.append(line)
        if self._live is None:
            self.console.print(line, soft_wrap=True)

    def show(self, scene: Scene) -> None:
        """Bring the table up to date."""
        if self._live is not None:
            self._live.update(self._rendered(scene), refresh=True)

    def close(self, result: outcome.Result) -> None:
        """Print the last table and the sentence that says what it means."""
        table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(style="dim")
        for line in result.lines():
            table.add_row(*line)
        self.console.print(table)
        if result.guarded:
            self._explain(result)
        style = "bold green" if result.verdict.count.right else "bold red"
        self.console.print(Text(result.sentence, style=style), soft_wrap=True)

    def _explain(self, result: outcome.Result) -> None:
        for wrong in result.verdict.count.wrong:
            rows = "; ".join(result.notes[wrong.period]) or "the ledger has no row"
            what = f"{wrong.period:%H:%M:%S}: {wrong.doubles} doubled, {wrong.missing} missing; "
            self.console.print(Text(what + rows), soft_wrap=True)

    def _rendered(self, scene: Scene) -> RenderableType:
        people = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, condition in scene.people:
            people.add_row(name, condition)
        lines: list[RenderableType] = [
            Text(f"{scene.elapsed:.0f} s"),
            people,
        ]
        if self._guarded:
            holders = [
                f"{holder.job} of {holder.due:%H:%M:%S}, held by {holder.node.partition('@')[0]} "
                f"for {(scene.now - holder.since).total_seconds():.1f} s, attempt {holder.attempt}"
                for holder in scene.holders
            ]
            lines.append(Text(f"lock     {'; '.join(holders) or 'free'}"))
        tally = scene.tally
        lines += [
            Text(f"books    {tally.invoices} invoices, periods: {tally.periods}, ").append(
                f"{tally.doubles} doubled", style="bold red" if tally.doubles else "green"
            ),
            Text(),
        ]
        for line in self._feed:
            shown = line.copy()
            shown.truncate(self.console.width - 1, overflow="ellipsis")
            lines.append(shown)
        return Group(*lines)
