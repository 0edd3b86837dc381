"""``beat_entries``: what each schedule entry was last sent for, and when it is due next.

An occurrence goes through three steps, so that no crash loses or doubles it:

1. *claim*: ``due_at`` moves on to the occurrence and ``published_at`` becomes null, together
   with the ``sent`` row of the ledger;
2. *publish*, with a task id that depends on entry and due instant alone;
3. *confirm*: ``published_at`` is set.

A leader that finds a claim without its confirmation publishes it again, with the same id and
for the same instant, before it claims anything else for that entry.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from celery_pglock import answers, beat_rows, periods, schedule_statements

NOBODY_LED: Final = "no beat was leading when it was due"
CLOCK_SET_FORWARD: Final = "the server's clock was set forward over it"

# So many rows at once: while a leader is busy with more of them its session is idle, and would end.
_PAGE: Final = 10_000


class Leader(Protocol):
    """Whoever runs statements over the lock session of a leader."""

    def execute(self, query: bytes, parameters: Mapping[str, Any]) -> list[Any]:
        """Run one and return its rows."""
        ...

    def send(
        self, query: bytes, parameters: Mapping[str, Any], *, uninterrupted: bool = False
    ) -> answers.Answer:
        """Send one and do not wait."""
        ...


class ScheduleStore:
    """The statements over ``beat_entries`` of one namespace, run by its leader.

    Args:
        namespace: whose entries.
        schema_name: where the tables are.
        leader: over whose lock session the statements go.

    Attributes:
        why_missed: the reason in the rows of occurrences that are missed from now on.
    """

    def __init__(
        self,
        namespace: str,
        schema_name: str,
        leader: Leader,
    ) -> None:
        self.namespace = namespace
        self.why_missed = NOBODY_LED
        self._schema = schema_name
        self._leader = leader

    def load(self, only: Collection[str] | None = None) -> dict[str, beat_rows.Stored]:
        """Return all entries of the namespace that were ever seen, or those with these names.

        Raises:
            LeadershipLost: as all of these methods do.
        """
        names = [field.name for field in dataclasses.fields(beat_rows.Stored)]
        pages = self._pages() if only is None else self._pages_of([*only])
        return {
            row.entry: beat_rows.Stored(**{name: getattr(row, name) for name in names})
            for rows in pages
            for row in rows
        }

    def _pages(self) -> Iterator[list[Any]]:
        after = ""
        rows: list[Any] = [None] * _PAGE
        while len(rows) == _PAGE:
            rows = self._run(schedule_statements.LOAD_PAGE, {"after": after, "most": _PAGE})
            yield rows
            after = rows[-1].entry if rows else after

    def _pages_of(self, names: list[str]) -> Iterator[list[Any]]:
        for start in range(0, len(names), _PAGE):
            yield self._run(schedule_statements.LOAD_SOME, {"names": names[start : start + _PAGE]})

    def paused(self) -> dict[str, dt.datetime]:
        """Return until when entries are or were paused; what was due before that is not sent."""
        return {row.entry: row.paused_until for row in self._run(schedule_statements.PAUSED, {})}

    def register(self, registrations: Sequence[beat_rows.Registration]) -> None:
        """Store entries that are new or edited."""
        for start in range(0, len(registrations), _PAGE):
            page = registrations[start : start + _PAGE]
            self._run(schedule_statements.REGISTER, _columns(page, beat_rows.Registration))

    def leave(self, names: Collection[str], term: int) -> None:
        """Record that nothing is due of these entries any more, because they were removed.

        What is claimed and was perhaps never sent is not sent any more.
        """
        self._run(schedule_statements.LEAVE, {"names": [*names], "term": term})

    def reset(self, resets: Sequence[beat_rows.Reset], term: int) -> None:
        """Bring entries back to the present whose last claim was due after it."""
        self._run(schedule_statements.RESET, {**_columns(resets, beat_rows.Reset), "term": term})

    def claim(self, occurrences: Sequence[beat_rows.Occurrence], term: int) -> set[str]:
        """Claim one occurrence for each of several entries; return the entries it worked for.

        It does not for an entry whose last claim is not confirmed, nor in another's term, nor
        for an occurrence that is due while its entry is paused, nor where somebody has edited
        the definition in the database since it was read.
        """
        return self.begin_claim(occurrences, term)()

    def begin_claim(
        self, occurrences: Sequence[beat_rows.Occurrence], term: int
    ) -> Callable[[], set[str]]:
        """Begin to ``claim``, and return what waits for the end of it and says what it says."""
        answer = self._begin(
            schedule_statements.CLAIM,
            {
                **_columns(occurrences, beat_rows.Occurrence),
                **_missed(occurrences),
                "term": term,
            },
        )
        return lambda: {row.entry for row in answer()}

    def pass_over(self, passed: Sequence[beat_rows.Passed], term: int) -> None:
        """Record what nobody sends any more, and when these entries are due again."""
        self._run(
            schedule_statements.MOVE_ON,
            {**_columns(passed, beat_rows.Passed), **_missed(passed), "term": term},
        )

    def confirm(self, occurrences: Sequence[beat_rows.Occurrence]) -> None:
        """Record that the messages of these occurrences have been handed to the broker."""
        self.begin_confirm(occurrences).rows()

    def begin_confirm(self, occurrences: Sequence[beat_rows.Occurrence]) -> answers.Answer:
        """Begin to ``confirm``, and return the answer; a signal waits until that has come."""
        query, parameters = self._bound(
            schedule_statements.CONFIRM,
            {
                "entry": [o.entry for o in occurrences],
                "due_at": [o.due_at for o in occurrences],
                "period": [o.period for o in occurrences],
            },
        )
        return self._leader.send(query, parameters, uninterrupted=True)

    def _run(self, template: str, parameters: Mapping[str, Any]) -> list[Any]:
        return self._leader.execute(*self._bound(template, parameters))

    def _begin(self, template: str, parameters: Mapping[str, Any]) -> Callable[[], list[Any]]:
        return self._leader.send(*self._bound(template, parameters)).rows

    def _bound(
        self, template: str, parameters: Mapping[str, Any]
    ) -> tuple[bytes, Mapping[str, Any]]:
        query = schedule_statements.statement(template, self._schema)
        return query, {
            **parameters,
            "namespace": self.namespace,
            "why_missed": self.why_missed,
        }


def _columns(items: Sequence[Any], kind: type[Any]) -> dict[str, list[Any]]:
    return {
        field.name: [getattr(item, field.name) for item in items]
        for field in dataclasses.fields(kind)
        if field.name not in ("late", "missed")
    }


def _missed(items: Sequence[beat_rows.Occurrence | beat_rows.Passed]) -> dict[str, list[Any]]:
    missed = [(item.entry, due) for item in items for due in item.missed]
    return {
        "missed_entry": [entry for entry, _ in missed],
        "missed_due_at": [due for _, due in missed],
        "missed_period": [periods.occurrence(due) for _, due in missed],
    }
