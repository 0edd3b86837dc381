"""The package without one of its rules, to show what each is for: what the controls run with.

Rules: `lock`, `run lock` (one key instead of two), `own session` (a pooled connection), `fixed key`
(`hash()` instead), `unique`, `fence`, `detector` (of lost sessions), `fork hook`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Final


def rules() -> list[str]:
    """Return the names of the rules that can be taken away."""
    return ["lock", *_RULES]


def take_away(rule: str, app: Any) -> None:
    """Take a rule away; called by the application when it is there."""
    if rule == "lock":
        app.conf.pglock_enabled = False
    elif rule in _RULES:
        _RULES[rule]()


def _one_key() -> None:
    """The lock name is all there is: what else runs this period is not asked."""
    from celery_pglock import ledger

    claim, settle = ledger.Ledger.claim, ledger.Ledger.settle

    def with_one(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(self: Any, session: Any, work: Any, *args: Any, **kwargs: Any) -> Any:
            work = dataclasses.replace(work, run_key=work.name_key)
            return call(self, session, work, *args, **kwargs)

        return called

    patched: Any = ledger.Ledger
    patched.claim, patched.settle = with_one(claim), with_one(settle)


def _pooled() -> None:
    """All runs of a process have one connection, as those that come from a pool may."""
    from celery_pglock import stacks

    shared: list[Any] = []

    def take(self: Any) -> Any:
        if not shared:
            shared.append(stacks.open_session(self._plan))
        # The server has no memory of who it was that asked: it says yes to the same session.
        shared[0].held.clear()
        return shared[0]

    patched: Any = stacks.Stack
    patched.take = take
    patched.give = lambda *_: None


def _salted() -> None:
    """Each process has keys of its own, as `hash()` gives them."""
    from celery_pglock import keys

    patched: Any = keys
    patched.from_name = lambda *parts: hash(parts)
    patched.of_run = lambda *parts: hash(parts)


def _not_unique() -> None:
    """Nothing in the table says that a period has one row."""
    from celery_pglock import schema, statements

    patched: Any = statements
    for name in ("_CLAIM", "SKIP", "POSTPONE"):
        statement = getattr(statements, name)
        plain = re.sub(r" ?on conflict.*?(?= returning|\Z)", "", statement, flags=re.DOTALL)
        assert plain != statement
        setattr(patched, name, plain)
    checking: Any = schema
    checking.verify = lambda *_: None


def _unfenced() -> None:
    """Whoever ends a run says what came of the period."""
    from celery_pglock import statements

    patched: Any = statements
    fence = re.compile(r" and claim = %\(claim\)s::uuid\s+and status \|\| '' = 'running'")
    for name in ("SETTLE_AND_UNLOCK", "SETTLE_ONLY"):
        statement, count = fence.subn("", getattr(statements, name))
        assert count == 1
        setattr(patched, name, statement)


def _unwatched() -> None:
    """Nobody looks at the sessions while a body works."""
    from celery_pglock import monitor

    patched: Any = monitor.Monitor
    patched.watch = lambda *_: None


def _inherited() -> None:
    """A child keeps the sockets of its parent."""
    from celery_pglock import forks

    patched: Any = forks
    patched.blind = lambda _: None


_RULES: Final[dict[str, Callable[[], None]]] = {
    "run lock": _one_key,
    "own session": _pooled,
    "fixed key": _salted,
    "unique": _not_unique,
    "fence": _unfenced,
    "detector": _unwatched,
    "fork hook": _inherited,
}
