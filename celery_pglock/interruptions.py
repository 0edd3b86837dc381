"""Interrupting a body in the main thread, as a soft time limit does.

A prefork or solo worker runs its bodies in the main thread of a process, and there a signal's
handler may raise: also in ``time.sleep`` and in a read that blocks. The handler is installed
once and stays. Taken away after each run, a signal that is still on its way would find the
default action, which ends the process; left in place, it finds no run to interrupt.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import ClassVar, Final

from celery_pglock import monitor

_DEFAULT: Final = signal.SIG_DFL


class Interruption:
    """A stretch of code that another thread can end with an exception.

    Outside the main thread, and where threads are greenlets, nothing can be interrupted.
    """

    _armed: ClassVar[list[Interruption]] = []

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> None:
        if (
            threading.current_thread() is threading.main_thread()
            and not monitor.cooperative()
            and _Handler.install()
        ):
            self._armed.append(self)
            if (error := self.error) is not None:
                # Struck before anybody could be interrupted.
                self._armed.remove(self)
                self.error = None
                raise error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self in self._armed:
            self._armed.remove(self)

    def strike(self, error: Exception) -> None:
        """Have the code raise this error; nothing happens when it has ended."""
        self.error = error
        if self in self._armed and _Handler.number is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, _Handler.number)

    @classmethod
    def handle(cls, _number: int, _frame: FrameType | None) -> None:
        """Raise what the innermost stretch was struck with, once."""
        for armed in reversed(cls._armed):
            error, armed.error = armed.error, None
            if error is not None:
                raise error


class _Handler:
    """The signal by which the main thread is interrupted: one that nobody else handles."""

    number: ClassVar[int | None] = None

    @classmethod
    def install(cls) -> bool:
        if cls.number is None:
            for number in range(signal.SIGRTMAX, signal.SIGRTMIN, -1):
                if signal.getsignal(number) is _DEFAULT:
                    signal.signal(number, Interruption.handle)
                    cls.number = number
                    break
        return cls.number is not None
