"""``LockedTask``: the base class that makes a task run once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import celery
import celery.states
import click
from celery.exceptions import Ignore, TaskRevokedError
from celery.result import EagerResult
from typing_extensions import override

from celery_pglock import (
    calls,
    errors,
    messages,
    notices,
    options,
    outcomes,
    policies,
    revocations,
    runs,
    settings,
    startup,
)

if TYPE_CHECKING:
    from celery import Celery

    _Task = celery.Task[..., Any]
else:
    # Generic at run time since Celery 5.7 only.
    _Task = celery.Task


class LockedTask(_Task):
    """A task whose runs exclude each other and that runs once per period.

    Use it as ``@app.task(base=LockedTask)``. The lock is a PostgreSQL advisory lock on a
    dedicated session, so it ends with the process that holds it; the period is recorded in
    ``job_runs``. Everything happens around the call of the body, so it guards a task however
    it is called: by a beat, by ``delay()``, ``send_task()``, ``apply()`` or as a function.

    When the lock is taken the call is skipped, postponed or raises, as ``lock_conflict`` says.
    A skip ends every wait: the result is ``REVOKED`` with ``TaskRevokedError``, no next step
    of a chain runs. When the lock session dies under the body, ``current_run().held`` says
    no, a body in the main thread is interrupted, and the run fails with ``LockLost``; with
    ``lock_lost="warn"`` it goes on and is recorded as done only if nobody has taken its period
    over. When the database cannot be reached, the body does not run.

    Options, given to ``@app.task(...)``; the setting ``pglock_<option>`` changes a default:

    - ``lock_level``: ``"session"`` (default) or ``"transaction"``: the body's own writes
      through ``current_run().connection`` commit together with the outcome.
    - ``lock_name``: a text, the 64-bit key itself, or a function of the bound arguments and
      the request; the task's registered name otherwise.
    - ``lock_by``: names of parameters that are part of the lock name.
    - ``lock_wait``: seconds to wait for the lock (default 0).
    - ``lock_conflict``: then ``"skip"`` (default), ``"postpone"`` or ``"raise"``.
    - ``skip_state``: ``"REVOKED"`` (default), or ``"SUCCESS"`` with a dictionary as result.
    - ``once_per``: ``"occurrence"`` (default), ``"minute"``, ``"hour"``, ``"day"``,
      ``"week"``, ``"month"``, a function of the due moment, or ``None``: lock only, no tables.
    - ``max_crash_retries``: how many attempts may die without an outcome (default 3).
    - ``lock_lost``: ``"raise"`` (default) or ``"warn"``.
    - ``lock_unavailable``: ``"postpone"`` (default) or ``"raise"``.
    - ``catchup``: how many missed occurrences a beat makes up (default 1).
    """

    # What a worker makes of a message; by its name, because only a worker has need of it.
    Request = "celery_pglock.worker_requests:Request"

    _pglock_options: ClassVar[options.Options | None] = None
    _pglock_policy: policies.Policy | None = None

    @override
    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Validate the options as soon as the task belongs to an application.

        Raises:
            ConfigurationError: an option is wrong; inside the ``celery`` command it is shown
                as one sentence, without a traceback.
        """
        super().on_bound(app)
        try:
            cls._pglock_options = options.of(cls)
            startup.register(app)
            revocations.register()
        except errors.ConfigurationError as error:
            if click.get_current_context(silent=True) is None:
                raise
            raise click.ClickException(str(error)) from None

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body under its lock, or end the call as its options say.

        Raises:
            JobSkipped: a direct call did not run.
            LockNotAcquired, LockLost, CrashRetriesExhausted, OutcomeUnknown: see ``errors``.
        """

        def body() -> Any:
            return super(LockedTask, self).__call__(*args, **kwargs)

        if (chosen := options.locked(self)) is None:
            return body()
        config, policy = settings.of(self.app), self._pglock_policy
        if not config.enabled:
            notices.disabled()
            return body()
        if policy is None or not policy.made_for(config, chosen):
            policy = self._pglock_policy = policies.Policy(self, config, chosen)
        call = calls.Call(
            policy=policy,
            args=args,
            kwargs=kwargs,
            body=body,
            request=self.request,
        )
        try:
            return call.make()
        except Ignore as ended:
            if call.ran:
                raise
            # Celery formats the traceback of what ends a message, line by line, and nobody reads
            # it: of a refusal that was most of the time it took.
            raise ended.with_traceback(None) from None

    @property
    def job_run(self) -> runs.Run | None:
        """The run in progress in this thread or greenlet, or None."""
        return runs.in_progress()

    @override
    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Execute the task in this process; a skip is ``REVOKED`` as it is in a worker."""
        result = super().apply(*args, **kwargs)
        if isinstance(result.result, outcomes.Skipped):
            return EagerResult(
                result.id,
                TaskRevokedError(str(result.result)),
                celery.states.REVOKED,
                name=self.name,
            )
        return result

    @override
    def on_replace(self, sig: Any) -> Any:
        """Hand over to another task, which keeps the period if it is this same task."""
        run = runs.in_progress()
        if run is None or self.request.is_eager:
            return super().on_replace(sig)
        same = sig.get("task") == self.name
        if same:
            messages.carry(sig, self.request.headers)
        try:
            return super().on_replace(sig)
        except Ignore as replaced:
            raise outcomes.Replaced(*replaced.args, status="retrying" if same else "done") from None
