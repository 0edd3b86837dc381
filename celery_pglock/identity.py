"""Which job a call belongs to, and which period."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable
from typing import ClassVar, cast

from celery_pglock import claims, errors, messages, options, periods, quick


@quick.dataclass(frozen=True, slots=True)
class Identity:
    """What a run is recorded under.

    Attributes:
        job: ``<namespace>:<name>``.
        period: the label; None when only the lock is wanted.
        window: the label holds only while the server's clock is inside it.
    """

    job: str
    period: str | None
    window: claims.Window | None = None


class Clock:
    """By which calendar periods are counted where a call has no due instant: by the server's.

    Attributes:
        instant: for tests (``testing.at``), another one in its place.
    """

    instant: ClassVar[dt.datetime | None] = None


@quick.dataclass(frozen=True, slots=True, kw_only=True)
class Identifier:
    """Finds job and period of the calls of one task.

    Attributes:
        namespace: of the application.
        zone: in which calendar periods are counted.
        task: the registered name of the task.
        rule: its ``once_per``.
        period_of: returns the period under which a message was claimed before, by job and id.
        server_now: asks the server for its clock.
    """

    namespace: str
    zone: dt.tzinfo
    task: str
    rule: options.OncePer
    period_of: Callable[[str, str | None], str | None]
    server_now: Callable[[], dt.datetime]

    def identify(
        self, delivery: messages.Delivery, lock_name: str, now: dt.datetime | None = None
    ) -> Identity:
        """Return what this call is recorded under.

        Args:
            delivery: what its message says.
            lock_name: which is the job's name under a calendar rule.
            now: the server's clock, where it is known.

        Raises:
            ConfigurationError: a ``once_per`` function returned something unusable.
        """
        by_name = f"{self.namespace}:{lock_name}"
        if self.rule is None:
            return Identity(by_name, None)
        if delivery.fixed and delivery.job and delivery.period:
            return Identity(delivery.job, delivery.period)
        if self.rule == "occurrence":
            if delivery.job and delivery.due:
                period = delivery.period or periods.occurrence(delivery.due)
                return Identity(delivery.job, period)
            # By the task's name and not the lock's, which may hold arguments: the history of
            # messages is then kept per task, and not for ever per argument.
            task_id = delivery.task_id or str(uuid.uuid4())
            return Identity(f"{self.namespace}:{self.task}", periods.message(task_id))
        if delivery.due is not None:
            return Identity(by_name, self._label(delivery.due))
        if delivery.redelivered:
            before = self.period_of(by_name, delivery.task_id)
            if before is not None:
                # Its first delivery was claimed in the period of that moment, and stays there.
                return Identity(by_name, before)
        return self._by_clock(by_name, now)

    def _by_clock(self, job: str, now: dt.datetime | None) -> Identity:
        now = Clock.instant or now
        if callable(self.rule) or now is not None:
            return Identity(job, self._label(now or self.server_now()))
        # This host's clock only guesses: the claim itself compares the server's clock with
        # the window, and says so when the guess was wrong.
        guess = dt.datetime.now(dt.UTC)
        window = periods.window(cast("periods.Calendar", self.rule), guess, self.zone)
        if window is None:
            guess = self.server_now()
        return Identity(job, self._label(guess), window)

    def _label(self, moment: dt.datetime) -> str:
        if not callable(self.rule):
            return periods.calendar(cast("periods.Calendar", self.rule), moment, self.zone)
        label: object = self.rule(moment.astimezone(self.zone))
        if not isinstance(label, str) or not label or "\0" in label:
            msg = (
                f"the once_per function of task {self.task!r} must return a text that names the "
                f"period; it returned {label!r}"
            )
            raise errors.ConfigurationError(msg)
        return label
