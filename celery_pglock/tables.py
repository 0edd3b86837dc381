"""The tables as SQLAlchemy tables, for Alembic users and queries.

The mirrors agree with the migrations; a test holds the two together. Nothing that a worker or a
beat needs imports this module, because it imports SQLAlchemy: see ``table_names``.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql


def mirror(metadata: sa.MetaData, schema: str = "pglock") -> dict[str, sa.Table]:
    """Add all tables to an SQLAlchemy ``MetaData``, and return them by their names.

    In a schema of their own Alembic's autogenerate leaves the tables alone; with
    ``include_schemas=True`` it would propose to drop what the metadata does not know.
    """
    return {
        table.name: table
        for table in (
            job_runs(metadata, schema),
            beat_entries(metadata, schema),
            beat_terms(metadata, schema),
            schema_version(metadata, schema),
        )
    }


def job_runs(metadata: sa.MetaData, schema: str = "pglock") -> sa.Table:
    """Return the mirror of ``job_runs``."""
    moment = sa.DateTime(timezone=True)
    return sa.Table(
        "job_runs",
        metadata,
        sa.Column("job", sa.Text, nullable=False),
        sa.Column("period", sa.Text, nullable=False),
        sa.Column("due_at", moment),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        sa.Column("lost_attempts", sa.Integer, nullable=False, server_default="0"),
        sa.Column("postponements", sa.Integer, nullable=False, server_default="0"),
        sa.Column("rescues", sa.Integer, nullable=False, server_default="0"),
        sa.Column("claim", postgresql.UUID(as_uuid=True)),
        sa.Column("name_key", sa.BigInteger),
        sa.Column("task", sa.Text),
        sa.Column("task_id", sa.Text),
        sa.Column("entry", sa.Text),
        sa.Column("node", sa.Text),
        sa.Column("backend_pid", sa.Integer),
        sa.Column("term", sa.BigInteger),
        sa.Column("sent_at", moment),
        sa.Column("started_at", moment),
        sa.Column("finished_at", moment),
        sa.Column("retry_at", moment),
        sa.Column("reason", sa.Text),
        sa.Column("error", sa.Text),
        sa.UniqueConstraint("job", "period", name="job_runs_job_period_key"),
        sa.CheckConstraint(
            "status IN ('sent', 'running', 'retrying', 'done', 'failed', 'skipped', 'missed')",
            name="job_runs_status_check",
        ),
        sa.Index(
            "job_runs_open_idx",
            "name_key",
            postgresql_where=sa.text("status IN ('sent', 'running', 'retrying')"),
        ),
        sa.Index(
            "job_runs_settled_idx",
            "finished_at",
            postgresql_where=sa.text("status IN ('done', 'failed', 'skipped', 'missed')"),
        ),
        schema=schema,
        keep_existing=True,
    )


def beat_entries(metadata: sa.MetaData, schema: str = "pglock") -> sa.Table:
    """Return the mirror of ``beat_entries``."""
    moment = sa.DateTime(timezone=True)
    return sa.Table(
        "beat_entries",
        metadata,
        sa.Column("namespace", sa.Text, nullable=False),
        sa.Column("entry", sa.Text, nullable=False),
        sa.Column("task", sa.Text, nullable=False),
        sa.Column("schedule", sa.Text, nullable=False),
        sa.Column("definition", postgresql.JSONB),
        sa.Column("anchor", moment, nullable=False),
        sa.Column("due_at", moment),
        sa.Column("task_id", sa.Text),
        sa.Column("published_at", moment),
        sa.Column("total_run_count", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("next_due_at", moment),
        sa.Column("paused_until", moment),
        sa.Column("paused_reason", sa.Text),
        sa.Column("seen_at", moment, nullable=False, server_default=sa.text("clock_timestamp()")),
        sa.Column("revision", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("edited_at", moment),
        sa.Column("added", sa.BigInteger),
        sa.Column("registered", sa.BigInteger),
        sa.PrimaryKeyConstraint("namespace", "entry", name="beat_entries_pkey"),
        schema=schema,
        keep_existing=True,
    )


def beat_terms(metadata: sa.MetaData, schema: str = "pglock") -> sa.Table:
    """Return the mirror of ``beat_terms``."""
    moment = sa.DateTime(timezone=True)
    return sa.Table(
        "beat_terms",
        metadata,
        sa.Column("namespace", sa.Text, nullable=False),
        sa.Column("term", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("backend_pid", sa.Integer, nullable=False),
        sa.Column("elected_at", moment, nullable=False),
        sa.Column("last_tick_at", moment, nullable=False),
        sa.Column("resigned_at", moment),
        sa.Column("fingerprint", sa.Text),
        sa.Column("missed_until", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("namespace", name="beat_terms_pkey"),
        schema=schema,
        keep_existing=True,
    )


def schema_version(metadata: sa.MetaData, schema: str = "pglock") -> sa.Table:
    """Return the mirror of ``schema_version``: which migrations have been applied."""
    moment = sa.DateTime(timezone=True)
    return sa.Table(
        "schema_version",
        metadata,
        sa.Column("number", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column(
            "applied_at", moment, nullable=False, server_default=sa.text("clock_timestamp()")
        ),
        sa.PrimaryKeyConstraint("number", name="schema_version_pkey"),
        schema=schema,
        keep_existing=True,
    )
