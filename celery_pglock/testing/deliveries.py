"""A message of a task, taken in this process as a worker takes it: no broker, no worker."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import datetime as dt
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import celery
from celery.app import trace
from celery.app.task import Context
from celery.exceptions import Ignore
from celery.worker.request import Request

from celery_pglock import (
    claims,
    errors,
    headers,
    options,
    periods,
    settings,
)
from celery_pglock.testing import clock, databases, outbox, signals

State = Literal["done", "failed", "retrying", "skipped", "postponed", "dropped", "lost"]

_HOSTNAME: Final = "testing@localhost"
# As if a leader had sent it, in its first term.
_TERM: Final = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a message.

    Attributes:
        state: ``done``; ``failed``; ``retrying``: it asked for a retry; ``skipped``; ``postponed``:
            sent again for later, because it could not run now and must not be lost; ``dropped``:
            acknowledged without a word, because its period is done by this very message or
            another copy of it is on its way; ``lost``: it ran, but another has its period
            (``lock_lost="warn"``).
        value: what the body returned, or the dictionary of ``skip_state="SUCCESS"``.
        error: what was raised: the body's own exception, ``LockLost``, ``Retry`` …; or None.
        reason: why it was skipped or postponed, or None.
        kind: how it was refused: ``closed``, ``running``, ``held`` or ``stale``, when it was
            skipped; or None.
        message: the message.
        sent: the messages that were published while it ran, and went nowhere.
    """

    state: State
    value: Any = None
    error: BaseException | None = None
    reason: str | None = None
    kind: claims.Refusal | None = None
    message: outbox.Message = dataclasses.field(repr=False)
    sent: Sequence[outbox.Message] = ()
    _row: databases.Row | None = dataclasses.field(repr=False)

    @property
    def row(self) -> databases.Row:
        """The row of its run, as it was afterwards.

        Raises:
            LookupError: there is none: the task has ``once_per=None``, its run was refused for a
                lock before there was one, or the database did not answer.
        """
        if self._row is None:
            raise LookupError(f"no row tells of {self.message!r}: it is {self.state}")
        return self._row

    @property
    def copy(self) -> outbox.Message:
        """The retry or the postponed copy with which this message goes on.

        Raises:
            LookupError: there is none.
        """
        for sent in self.sent:
            if sent.task_id == self.message.task_id:
                return sent
        raise LookupError(f"nothing was sent to go on with {self.message!r}: it is {self.state}")


def run_occurrence(
    task: celery.Task[..., Any],
    due: dt.datetime,
    *,
    entry: str | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Outcome:
    """Run a task as if a beat had sent this occurrence and a worker had taken its message.

    In this process and thread, at once. Each call is another message: the second one for the
    same occurrence is skipped. For one message twice see ``deliver``.

    Args:
        task: a LockedTask, of the application that is pointed at the test's database.
        due: when the occurrence was due, with its time zone.
        entry: the schedule entry; by default the name of the task.
        args: the entry's positional arguments.
        kwargs: the entry's keyword arguments.

    Returns:
        What came of it. An exception of the body is in there and not raised; a SystemExit or
        KeyboardInterrupt is raised.

    Raises:
        RuntimeError: the application is not pointed at a database of this test.
        TypeError: the task takes no lock, or the arguments do not fit it.
        ValueError: ``due`` has no time zone.
    """
    return deliver(published(task, due, entry=entry, args=args, kwargs=kwargs))


def published(
    task: celery.Task[..., Any],
    due: dt.datetime,
    *,
    entry: str | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> outbox.Message:
    """Publish an occurrence as a beat does: its row ``sent``, and its message."""
    app, database = databases.of(task.app)
    if (chosen := options.locked(task)) is None:
        raise TypeError(f"task {task.name!r} takes no lock: its base is not LockedTask")
    config = settings.of(app)
    due = clock.aware(due).astimezone(dt.UTC)
    entry = entry or task.name
    job, period, task_id = f"{config.namespace}:{entry}", periods.occurrence(due), str(uuid.uuid4())
    sender: dict[str, Any] = headers.by_hand(job, period, due, entry, fixed=False)
    with outbox.opened(task) as sent:
        task.apply_async(
            tuple(args),
            dict(kwargs or {}),
            task_id=task_id,
            headers=sender | {"pglock_term": _TERM},
        )
    if chosen.recorded(config.options):
        # One that does not answer has answered before, when the beat sent this.
        with contextlib.suppress(errors.DatabaseUnavailable):
            database.rows(
                f'insert into "{config.schema}".job_runs'  # noqa: S608 - checked by settings
                " (job, period, due_at, status, task, task_id, entry, term)"
                " values (%s, %s, %s, 'sent', %s, %s, %s, %s) on conflict do nothing",
                *(job, period, due, task.name, task_id, entry, _TERM),
            )
    (message,) = sent
    return message


def deliver(message: outbox.Message, *, redelivered: bool = False) -> Outcome:
    """Do with a message what a worker does with it, at once, whatever its ETA or expiry.

    With ``redelivered=True`` the same message a second time, as a broker delivers it whose
    worker died: ``deliver(outcome.message, redelivered=True)``. A retry or a postponed copy:
    ``deliver(outcome.copy)``. A message that must not be lost waits for up to 3 s for the run
    that is in its way before it is postponed, as it does in a worker.

    Raises:
        RuntimeError: the application is not pointed at a database of this test.
    """
    app, database = databases.of(message.app)
    task: celery.Task[..., Any] = app.tasks[message.task]
    request = request_of(message, redelivered=redelivered)
    with outbox.opened(task) as sent, _Witness(task, message.task_id).looking() as witness:
        tracer = trace.build_tracer(task.name, task, app.loader, _HOSTNAME, app=app)
        answer = tracer(message.task_id, request.args, request.kwargs, request.request_dict)
    error: BaseException | None = None if answer.info is None else answer.info.retval
    state, value = witness.state, None if error is not None else answer.retval
    if state is None:
        state = "dropped" if isinstance(error, Ignore) else "failed"
    if isinstance(error, Ignore) and state != "failed":
        # How Celery ends what did not run, or what has handed over to another task.
        error = None
    return Outcome(
        state=state,
        value=value,
        error=error,
        reason=witness.reason,
        kind=witness.kind,
        message=message,
        sent=tuple(sent),
        _row=_row(database, witness, message.task_id),
    )


def request_of(message: outbox.Message, *, redelivered: bool) -> Any:
    """Return a message as a worker has it before it executes it."""
    app = message.app
    received = message.received(redelivered=redelivered)
    return Request(received, hostname=_HOSTNAME, app=app, task=app.tasks[message.task])


@contextlib.contextmanager
def requested(
    task: celery.Task[..., Any], message: outbox.Message, *, redelivered: bool
) -> Iterator[None]:
    """Make a message the request of its task, without executing it."""
    request = request_of(message, redelivered=redelivered)
    task.request_stack.push(
        Context(
            request.request_dict, args=request.args, kwargs=request.kwargs, called_directly=False
        )
    )
    try:
        yield
    finally:
        task.request_stack.pop()


class _Witness:
    """Sees what the signals tell of one delivery."""

    _current: contextvars.ContextVar[_Witness | None] = contextvars.ContextVar(
        "celery_pglock_witness", default=None
    )

    def __init__(self, task: celery.Task[..., Any], task_id: str) -> None:
        self.state: State | None = None
        self.reason: str | None = None
        self.kind: claims.Refusal | None = None
        self.job: str | None = None
        self.period: str | None = None
        self._task = task
        self._task_id = task_id

    @contextlib.contextmanager
    def looking(self) -> Iterator[_Witness]:
        """See what is told in this thread, for the length of a block."""
        before = self._current.get()
        self._current.set(self)
        try:
            with signals.listening(
                self._task,
                skipped=self._skipped,
                postponed=self._postponed,
                finished=self._finished,
            ):
                yield self
        finally:
            self._current.set(before)

    def _skipped(self, task_id: str | None, kind: claims.Refusal, **told: Any) -> None:
        if self._told("skipped", task_id, **told):
            self.kind = kind

    def _postponed(self, task_id: str | None, **told: Any) -> None:
        self._told("postponed", task_id, **told)

    def _told(
        self, state: State, task_id: str | None, *, job: str, period: str, reason: str, **_: Any
    ) -> bool:
        # A body may call its own task directly: that call has no message.
        if self._current.get() is not self or task_id != self._task_id:
            return False
        self.state, self.job, self.period, self.reason = state, job, period, reason
        return True

    def _finished(self, run: Any, status: State, **_: Any) -> None:
        # Of a task that calls itself the outer run is the last to end.
        if self._current.get() is self:
            self.state, self.job, self.period = status, run.job, run.period


def _row(database: databases.Database, witness: _Witness, task_id: str) -> databases.Row | None:
    with contextlib.suppress(errors.DatabaseUnavailable):
        for row in database.runs(witness.job):
            if row.period == witness.period if witness.job else row.task_id == task_id:
                return row
    return None
