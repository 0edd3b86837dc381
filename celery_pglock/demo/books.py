"""The books that must be right: invoices without a unique constraint, and who wrote at them.

A unique constraint would hide what the demonstration is about. ``attempts`` is written before
the first invoice and outside of any transaction, so an attempt that is killed has left it.
"""

from __future__ import annotations

import datetime as dt
import os
from typing import Final

import psycopg
import sqlalchemy as sa

#: How often the job is due, in seconds.
EVERY: Final = 2.0
#: How many invoices each period has to have.
CUSTOMERS: Final = 50
#: How long writing them takes, in seconds: long enough for a kill to strike in the middle.
WRITING: Final = 0.8

TABLES: Final = b"""
CREATE SCHEMA demo;
CREATE TABLE demo.invoices (
    period timestamptz NOT NULL,
    customer integer NOT NULL,
    worker text NOT NULL
);
CREATE TABLE demo.attempts (
    id bigserial PRIMARY KEY,
    period timestamptz NOT NULL,
    task_id text NOT NULL,
    worker text NOT NULL,
    pid integer NOT NULL,
    began_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);
"""

INVOICE: Final = sa.text(
    "INSERT INTO demo.invoices (period, customer, worker) VALUES (:period, :customer, :worker)"
)


def begin(url: str, period: dt.datetime, task_id: str, worker: str) -> None:
    """Record that somebody begins to write the invoices of a period."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO demo.attempts (period, task_id, worker, pid) VALUES (%s, %s, %s, %s)",
            (period, task_id, worker, os.getpid()),
        )


def by_the_clock(seconds: float) -> dt.datetime:
    """Return the period in which a moment falls, as people compute it: clock // length."""
    return dt.datetime.fromtimestamp(seconds // EVERY * EVERY, dt.UTC)
