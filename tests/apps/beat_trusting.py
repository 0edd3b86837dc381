"""A scheduler that never ceases to trust itself, so that tests can show what follows from that.

It goes on as stock beat does: by its own memory, whatever has become of its session.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from celery_pglock import answers, beat, errors, leadership

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_pglock import beat_rows


class _Trusting(leadership.Leadership):
    """Once elected it leads for ever."""

    @property
    @override
    def held(self) -> bool:
        return self.leading

    @override
    def listen(self) -> None:
        """Do not look at the socket."""

    @override
    def confirm(self) -> None:
        with contextlib.suppress(errors.LeadershipLost):
            super().confirm()

    @override
    def lose(self, reason: str) -> errors.LeadershipLost:
        return errors.LeadershipLost(self.namespace, self.term or 0, reason)


class Trusting(beat.LeaderScheduler):
    """Needs nobody's leave to send."""

    @override
    def setup_schedule(self) -> None:
        proper = leadership.Leadership
        leadership.Leadership = _Trusting  # type: ignore[misc]
        try:
            super().setup_schedule()
        finally:
            leadership.Leadership = proper  # type: ignore[misc]
        store: Any = self._leading.store
        claim, confirm = store.begin_claim, store.begin_confirm

        def claim_or_not(due: Sequence[beat_rows.Occurrence], term: int) -> Callable[[], set[str]]:
            with contextlib.suppress(errors.LeadershipLost):
                claim(due, term)()
            return lambda: {occurrence.entry for occurrence in due}

        def confirm_or_not(sent: Sequence[beat_rows.Occurrence]) -> answers.Answer:
            with contextlib.suppress(errors.LeadershipLost):
                confirm(sent).rows()
            return answers.Answer(list)

        store.begin_claim, store.begin_confirm = claim_or_not, confirm_or_not
