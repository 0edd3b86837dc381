"""The migration operation that applies the numbered SQL files, exactly as ``pglock migrate`` does."""

from __future__ import annotations

from typing import Any

from django.db import router
from django.db.migrations.operations.base import Operation
from typing_extensions import override

from celery_pglock import migrating, schema
from celery_pglock.contrib.django import aliases, project


class ApplySteps(Operation):
    """Bring the tables up to date, as ``celery -A proj pglock migrate`` would.

    Over connections of its own, under the lock of all migrators, each step in a transaction with
    its row in ``schema_version``: so either command may come first, and both may come at once.
    There is one such operation for each release that has new steps. Nothing is undone by migrating
    backwards: that would delete the history by which a period is known to have run.

    Args:
        through: the name of the newest step, which a test holds against the files.
    """

    reduces_to_sql = True
    reversible = False

    def __init__(self, through: str) -> None:
        self.through = through

    @override
    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        return type(self).__name__, [self.through], {}

    @override
    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change nothing: the models are told of by the operations beside this one."""

    @override
    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Apply what is pending, unless the tables belong into another database."""
        alias = schema_editor.connection.alias
        if not _belong_into(schema_editor.connection, app_label):
            return
        if schema_editor.collect_sql:
            # As it is: what Django executes it would read for placeholders.
            schema_editor.collected_sql.extend(schema.script(project.schema()).splitlines())
            return
        migrating.migrate(lambda: aliases.target(alias), project.schema())

    @override
    def describe(self) -> str:
        return f"Apply the SQL steps of celery-pglock through {self.through}"


def _belong_into(connection: Any, app_label: str) -> bool:
    if (home := project.alias()) is not None:
        return bool(connection.alias == home)
    # By a URL nobody can tell which alias is that database, but the project's routers.
    return connection.vendor == "postgresql" and router.allow_migrate(connection.alias, app_label)
