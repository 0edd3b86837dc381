"""What a web framework lends: where a database of its is, and its own connection to it.

A framework keeps a connection for each thread, on which its ORM works. A run at transaction level
has to be on that very connection, or what the ORM writes would not be committed with the outcome.
The framework's side registers itself here, so that nothing of celery-pglock imports a framework.
"""

from __future__ import annotations

import uuid
from typing import Protocol

from celery_pglock import claims, errors, sessions, stacks, transactions


class Lender(Protocol):
    """A framework with databases that have names."""

    def conninfo(self, alias: str) -> str:
        """Return libpq's connection string of a database, for connections of our own.

        Raises:
            ConfigurationError: there is no such database, or it is not PostgreSQL.
        """
        ...

    def stack(self, alias: str, plan: sessions.Plan) -> stacks.Stack:
        """Return where a run finds the framework's own connection, as a session."""
        ...

    def transact(
        self,
        session: sessions.Session,
        records: transactions.Records,
        work: claims.Work,
        claim: uuid.UUID,
    ) -> transactions.Transaction:
        """Make the transaction of a run on the framework's own connection."""
        ...


_registered: list[Lender] = []


def register(found: Lender) -> None:
    """Have this framework lend; called while it starts."""
    _registered[:] = [found]


def lender() -> Lender:
    """Return the framework that lends.

    Raises:
        ConfigurationError: none has started.
    """
    if not _registered:
        msg = (
            "pglock_django_alias is set, but Django does not lend its connections; add "
            '"celery_pglock.contrib.django" to INSTALLED_APPS, and have django.setup() called '
            "before (the celery command does, where DJANGO_SETTINGS_MODULE is set)"
        )
        raise errors.ConfigurationError(msg)
    return _registered[0]
