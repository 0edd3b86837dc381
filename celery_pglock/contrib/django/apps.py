"""The app itself: what is done once when Django starts."""

from __future__ import annotations

import uuid

from django.apps import AppConfig
from typing_extensions import override

from celery_pglock import claims, lending, sessions, stacks, transactions
from celery_pglock.contrib.django import aliases


class PglockConfig(AppConfig):
    """``"celery_pglock.contrib.django"`` in ``INSTALLED_APPS``; its label is ``celery_pglock``."""

    name = "celery_pglock.contrib.django"
    label = "celery_pglock"
    verbose_name = "Periodic jobs"
    default_auto_field = "django.db.models.BigAutoField"

    @override
    def ready(self) -> None:
        """Lend Django's connections to runs, and have its checks know of us."""
        from celery_pglock.contrib.django import checks

        lending.register(DjangoLender())
        checks.register()


class DjangoLender:
    """What ``lending.Lender`` asks for, by Django's aliases."""

    def conninfo(self, alias: str) -> str:
        """Return libpq's connection string of an alias."""
        return aliases.target(alias)

    def stack(self, alias: str, plan: sessions.Plan) -> stacks.Stack:
        """Return where a run finds Django's own connection, as a session."""
        from celery_pglock.contrib.django import borrowed

        return borrowed.BorrowedStack(alias, plan)

    def transact(
        self,
        session: sessions.Session,
        records: transactions.Records,
        work: claims.Work,
        claim: uuid.UUID,
    ) -> transactions.Transaction:
        """Make the transaction of a run on Django's own connection."""
        from celery_pglock.contrib.django import atomic_runs

        return atomic_runs.AtomicTransaction(session, records, work, claim)
