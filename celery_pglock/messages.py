"""What the message of a call says of it, and sending the same message again.

Our headers are read from ``request.headers``, which is filled in a worker, by ``apply()`` and
in eager mode alike. They are plain JSON values:

- ``pglock_job``, ``pglock_period``, ``pglock_due``, ``pglock_term``, ``pglock_entry``: set by
  the beat that sent the occurrence;
- ``pglock_late``: set by a beat for occurrences that it sends several at a time;
- ``pglock_seen``: set by a beat in a rescue copy: the attempts that the row had. The retries of
  the run that it starts do not keep it;
- ``pglock_fixed``: job and period have been settled on by a claim; retries, postponed and
  replaced copies keep them;
- ``pglock_postponed``, ``pglock_postponed_since``: the number of a postponed copy, and when
  the first of them was sent. Such a copy arrives like a fresh message, neither redelivered
  nor with retries, so nothing else marks it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import kombu.exceptions
from celery.exceptions import Ignore, Reject

from celery_pglock import claims, quick

if TYPE_CHECKING:
    import celery
    from celery.app.task import Context

# A message that is refused waits here first, because its own earlier run is often just about
# to end: self.retry() publishes while the lock is still held, and a redelivery after a crash
# arrives within milliseconds.
_WAIT: Final = 3.0
_LONGEST: Final = 60.0
_GIVE_UP_AFTER: Final = dt.timedelta(hours=1)
_DEFAULT_VISIBILITY: Final = 3600.0
_ENTERED: Final = "pglock_entered"


@quick.dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One arrival of a message, or a direct call.

    Attributes:
        task_id: the message's id; None for a direct call.
        direct: the task was called as a function.
        eager: it is executed in the caller's process by ``apply()``.
        redelivered: the broker says that it was delivered before: a hint, not a proof.
        retries: how many times the task asked for a retry.
        postponed: the number of the postponed copy, 0 for none.
        postponed_since: when the first postponed copy was sent.
        fixed: job and period are settled.
        job: ``pglock_job``.
        period: ``pglock_period``.
        due: ``pglock_due``.
        term: ``pglock_term``.
        entry: ``pglock_entry``.
        stock_beat: it was sent by a beat that knows nothing of celery-pglock.
        late: it is one of several that are made up for after a take-over or an outage.
        seen: it is a rescue copy, sent when the row had so many attempts.
        expires: when the message expires.
    """

    task_id: str | None
    direct: bool
    eager: bool = False
    redelivered: bool = False
    retries: int = 0
    postponed: int = 0
    postponed_since: dt.datetime | None = None
    fixed: bool = False
    job: str | None = None
    period: str | None = None
    due: dt.datetime | None = None
    term: int | None = None
    entry: str | None = None
    stock_beat: bool = False
    late: bool = False
    seen: int | None = None
    expires: dt.datetime | None = None

    def repeats(self, row: claims.Row | None) -> bool:
        """Whether the same message may have been delivered before, so that it must not be lost.

        A beat's own ``sent`` row carries the id of the fresh message too: that is no repeat.
        """
        return (
            self.redelivered
            or self.retries > 0
            or self.postponed > 0
            or (
                row is not None
                and self.task_id is not None
                and row.task_id == self.task_id
                and row.status in ("running", "retrying", "failed")
            )
        )

    def superseded(self, row: claims.Row | None) -> bool:
        """Whether a later postponed copy of this very message is on its way."""
        return (
            row is not None and row.task_id == self.task_id and row.postponements > self.postponed
        )


def read(request: Context) -> Delivery:
    """Read what the request of the current call says."""
    # A task that calls itself finds its own delivery's request: marked by the worker, or in
    # eager mode by us, in a copy.
    marked = getattr(request, "_protected", False) or getattr(request, _ENTERED, False)
    if request.called_directly or marked:
        return Delivery(task_id=None, direct=True)
    header = (request.headers or {}).get
    due = _moment(header("pglock_due"))
    return Delivery(
        task_id=request.id,
        direct=False,
        eager=bool(request.is_eager),
        redelivered=bool((request.delivery_info or {}).get("redelivered")),
        retries=request.retries or 0,
        postponed=int(header("pglock_postponed") or 0),
        postponed_since=_moment(header("pglock_postponed_since")),
        fixed=bool(header("pglock_fixed")),
        job=header("pglock_job"),
        period=header("pglock_period"),
        due=due,
        term=header("pglock_term"),
        entry=header("pglock_entry"),
        stock_beat=bool(header("celery_beat_task")) and due is None,
        late=bool(header("pglock_late")),
        seen=header("pglock_seen"),
        expires=_moment(request.expires),
    )


def fix(request: Context, work: claims.Work) -> None:
    """Write job and period into the request, from which Celery makes the retries' headers.

    Called when the body is about to begin, which is marked too.
    """
    setattr(request, _ENTERED, True)
    headers = {**(request.headers or {}), **_headers(work)}
    headers.pop("pglock_seen", None)
    request.headers = headers


def carry(signature: Any, work_headers: Mapping[str, Any] | None) -> None:
    """Give a signature the ``pglock_*`` headers of a request."""
    ours = {k: v for k, v in (work_headers or {}).items() if k.startswith("pglock_")}
    signature.set(headers={**(signature.options.get("headers") or {}), **ours})


def wait(task: celery.Task[..., Any]) -> float:
    """Return for how many seconds a repeated message may wait inside the worker."""
    return min(_WAIT, _patience(task) / 2)


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """A postponed copy of a message.

    Attributes:
        number: 1 for the first copy, and so on.
        countdown: seconds until it is due.
        since: when the first copy was sent.
    """

    number: int
    countdown: float
    since: dt.datetime


def next_copy(task: celery.Task[..., Any], delivery: Delivery) -> Copy | None:
    """Return the next postponed copy, or None when the message has waited long enough.

    1, 2, 4 … 60 s. The wait in the worker and the countdown together stay within a third of
    the broker's visibility time-out: beyond it the broker would deliver the copy a second
    time while it waits, and copies would multiply.
    """
    now = dt.datetime.now(dt.UTC)
    number = delivery.postponed + 1
    countdown = min(2.0 ** min(number - 1, 10), _LONGEST, _patience(task) - wait(task))
    since = delivery.postponed_since or now
    until = since + _GIVE_UP_AFTER
    if delivery.expires is not None:
        until = min(until, delivery.expires)
    if now + dt.timedelta(seconds=countdown) > until:
        return None
    return Copy(number, countdown, since)


def send(
    task: celery.Task[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    work: claims.Work | None,
    copy: Copy,
) -> None:
    """Send the same message again: same id, no retry used up, nothing said of its result.

    ``work`` is None when its period is not known, because the database could not be asked.

    Raises:
        Reject: the broker does not take it; a message that is acknowledged late goes back.
        kombu.exceptions.OperationalError: the same for one that is acknowledged already.
    """
    request = task.request
    signature = task.signature_from_request(
        request,
        args,
        kwargs,
        countdown=copy.countdown,
        retries=request.retries,
        headers={
            **{k: v for k, v in (request.headers or {}).items() if k != "redelivered"},
            **({} if work is None else _headers(work)),
            "pglock_postponed": copy.number,
            "pglock_postponed_since": copy.since.isoformat(),
        },
    )
    try:
        signature.apply_async()
    except (kombu.exceptions.OperationalError, OSError) as error:
        if task.acks_late:
            raise Reject(error, requeue=True) from error
        raise


def drop() -> Ignore:
    """Return what ends a delivery without a word about its result."""
    return Ignore()


def _headers(work: claims.Work) -> dict[str, Any]:
    headers: dict[str, Any] = {"pglock_job": work.job, "pglock_fixed": True}
    if work.period is not None:
        headers["pglock_period"] = work.period
    if work.due_at is not None:
        headers["pglock_due"] = work.due_at.isoformat()
    if work.term is not None:
        headers["pglock_term"] = work.term
    if work.entry is not None:
        headers["pglock_entry"] = work.entry
    return headers


def visibility_timeout(app: celery.Celery, default: float = _DEFAULT_VISIBILITY) -> float:
    """Return after how many seconds a broker delivers again what is not acknowledged."""
    given = (app.conf.broker_transport_options or {}).get("visibility_timeout", default)
    with contextlib.suppress(TypeError, ValueError):
        return float(given)
    return default


def _patience(task: celery.Task[..., Any]) -> float:
    return max(0.2, visibility_timeout(task.app) / 3)


def _moment(value: object) -> dt.datetime | None:
    if value is None:
        return None
    if isinstance(value, dt.datetime):
        moment = value
    elif isinstance(value, str):
        try:
            moment = dt.datetime.fromisoformat(value)
        except ValueError:
            return None
    else:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)
