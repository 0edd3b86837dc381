"""A message that Celery throws away, because it was revoked or has expired, settles its period.

Without that its row would stay ``sent``, and the leader would take the message for lost and
send it again. Celery tells of it in the worker's main process (signal ``task_revoked``), in the
loop that consumes messages. That loop must not wait for the database, and no lock session may
be kept in the process that forks the others: so a thread of its own does it, over a session
that is closed as soon as there is nothing more to settle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import socket
import threading
from typing import Any, Final

from celery import signals

from celery_pglock import errors, idle_sessions, ledger, options, schema, sessions, settings, stacks

_log: Final = logging.getLogger("celery_pglock.task")

# Seconds: how long the thread waits for more, and how long a worker that ends waits for it.
_LINGER: Final = 1.0
_GOOD_BYE: Final = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Revoked:
    """One message that is thrown away."""

    config: settings.Settings
    level: sessions.Level
    task: str
    task_id: str
    why: str
    running: bool


class _Desk:
    """The thread of this process that settles what comes, while there is something."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._waiting: queue.SimpleQueue[Revoked] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def hand_in(self, revoked: Revoked) -> None:
        if self._pid != os.getpid():
            # The thread is the parent's, and the mutex may have been held by it.
            self.__init__()  # type: ignore[misc]
        with self._mutex:
            self._waiting.put(revoked)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="celery-pglock-revocations", daemon=True
                )
                self._thread.start()

    def finish(self) -> None:
        thread = self._thread
        if self._pid == os.getpid() and thread is not None:
            thread.join(_GOOD_BYE)

    def _work(self) -> None:
        with contextlib.ExitStack() as stack:
            opened: dict[tuple[int, sessions.Level], sessions.Session] = {}
            while (revoked := self._next()) is not None:
                key = (id(revoked.config), revoked.level)
                try:
                    session = opened.get(key)
                    if session is None or session.connection.closed:
                        session = stack.enter_context(contextlib.closing(_open(revoked)))
                        opened[key] = session
                    _settle(session, revoked)
                except errors.PGLockError as error:
                    _warn(revoked, error)

    def _next(self) -> Revoked | None:
        try:
            return self._waiting.get(timeout=_LINGER)
        except queue.Empty:
            with self._mutex:
                if self._waiting.empty():
                    self._thread = None
                    return None
            return self._waiting.get()


_desk: Final = _Desk()


def close(
    sender: Any = None,
    request: Any = None,
    terminated: bool = False,  # noqa: FBT001, FBT002 - the signal's own arguments
    expired: bool = False,  # noqa: FBT001, FBT002
    **_: object,
) -> None:
    """Have the row of a message settled that is thrown away; a receiver of ``task_revoked``.

    Of a message that is not executed any more, or whose run is being ended (``terminated``).
    """
    chosen = options.locked(sender)
    if chosen is None:
        return
    config = settings.of(sender.app)
    if config.enabled and chosen.recorded(config.options):
        _desk.hand_in(
            Revoked(
                config=config,
                level=chosen.value("lock_level", config.options),
                task=sender.name,
                task_id=request.id,
                why="its message had expired" if expired else "its message was revoked",
                running=bool(terminated),
            )
        )


def register() -> None:
    """Have Celery tell of what it throws away; may be called often."""
    signals.task_revoked.connect(close, weak=False, dispatch_uid="celery_pglock.revocations")
    signals.worker_shutdown.connect(_finish, weak=False, dispatch_uid="celery_pglock.revocations")


def _finish(**_: object) -> None:
    _desk.finish()


def _open(revoked: Revoked) -> sessions.Session:
    node = f"{socket.gethostname()}:{os.getpid()}"
    return stacks.open_session(idle_sessions.plan(revoked.config, revoked.level, node))


def _settle(session: sessions.Session, revoked: Revoked) -> None:
    config = revoked.config
    with schema.translated(session.target, config.schema):
        ledger.Ledger(config.schema).revoke(
            session, config.namespace, revoked.task_id, revoked.why, running=revoked.running
        )


def _warn(revoked: Revoked, error: errors.PGLockError) -> None:
    _log.warning(
        "task %s[%s] will be sent again by the leader although %s, because its row could not be "
        "settled: %s; revoke it once more when that is put right",
        revoked.task,
        revoked.task_id,
        revoked.why,
        error,
        extra={"event": "revocation_not_recorded", "task_id": revoked.task_id},
    )
