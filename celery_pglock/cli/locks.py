"""``pglock locks``: which advisory locks are held in the database, and by whom."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterator, Sequence
from typing import Any

import click

from celery_pglock import connections, errors, holders, options, schema, settings, startup
from celery_pglock.cli import columns, documents, moments, sending, session, switches, terminal

_WIDTH = 11


@dataclasses.dataclass(frozen=True, slots=True)
class Registered:
    """The lock name of a task.

    Attributes:
        task: its registered name.
        name: the lock name; None where a function makes it.
        key: its key; None where it depends on the arguments of the call.
        depends_on: ``lock_name`` or ``lock_by``, where it does.
    """

    task: str
    name: str | None
    key: int | None
    depends_on: str | None


@click.command(name="locks")
@click.option("--all", "show_all", is_flag=True, help="Also the lock names that nobody holds.")
@switches.utc
@switches.as_json
@click.pass_context
def command(ctx: click.Context, *, show_all: bool, utc: bool, as_json: bool) -> None:
    """Show every advisory lock that is held in the database, by its name where it is ours."""
    app, config = ctx.obj.app, ctx.obj.settings
    sending.schedule(app)  # loads all modules, so that all tasks are there
    registered = [
        _registered(config, task, chosen) for task, chosen in startup.locked_tasks(app).items()
    ]
    zone = moments.zone(ctx, utc=utc)
    shown = _read(config, registered)
    if show_all:
        shown["names"] = [dataclasses.asdict(each) for each in registered]
    if as_json:
        shown["locks"] = [dataclasses.asdict(lock) for lock in shown["locks"]]
        documents.write(shown, zone)
    else:
        described = _Described(terminal.width(), zone)
        named = registered if show_all else []
        terminal.write(described.lines(config.namespace, shown, named))


def _registered(config: settings.Settings, task: str, chosen: options.Options) -> Registered:
    lock = chosen.plain_lock(config.namespace, task)
    if lock is None:
        return Registered(task, None, None, "lock_name")
    if chosen.given.get("lock_by"):
        return Registered(task, lock[0], None, "lock_by")
    return Registered(task, *lock, None)


def _read(config: settings.Settings, registered: Sequence[Registered]) -> dict[str, Any]:
    with session.opened(config, "locks") as connection:
        there: str | None = config.schema
        try:
            schema.check(connection, config.schema)
        except errors.SchemaError:
            there = None  # locks without tables are locks too
        found = holders.held(
            connection,
            namespace=config.namespace,
            schema=there,
            schema_lock=config.schema,
            names={
                each.key: each.name
                for each in registered
                if each.key is not None and each.name is not None
            },
        )
        return {
            "namespace": config.namespace,
            "database": connections.describe_open(connection),
            "tables": there is not None,
            "locks": found,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class _Described:
    """What is shown, in lines of a width and with times in a zone."""

    width: int | None
    zone: dt.tzinfo

    def lines(
        self, namespace: str, shown: dict[str, Any], registered: Sequence[Registered]
    ) -> Iterator[columns.Line]:
        locks: list[holders.Held] = shown["locks"]
        count = f"{len(locks)} lock{'' if len(locks) == 1 else 's'} held"
        yield from self._beside("namespace", f"{namespace} in {shown['database']}", count)
        if not shown["tables"]:
            yield from self._beside("", "without tables, so runs are not known by name")
        for lock in locks:
            label = lock.kind or ("unknown" if lock.ours else "foreign")
            kind = "label" if lock.ours else "foreign"
            yield from self._beside(label, *self._told(lock), kind=kind)
        held = {lock.key for lock in locks}
        for each in registered:
            if each.key is None:
                name = each.name or f"made by the lock_name function of {each.task}"
                yield from self._beside("any", f"{name}, key depends on {each.depends_on}")
            elif each.key not in held:
                yield from self._beside("free", f"{each.name}", f"key {each.key}")

    def _beside(self, label: str, *texts: str, kind: str = "label") -> Iterator[columns.Line]:
        return columns.hanging(label, _WIDTH, *texts, width=self.width, kind=kind)

    def _told(self, lock: holders.Held) -> Iterator[str]:
        key = f"key {lock.key}" if lock.pair is None else f"keys {lock.pair[0]} and {lock.pair[1]}"
        key += ", shared" if lock.shared else ""
        if lock.kind is None:
            yield f"{key}, of no name that is known here"
        else:
            yield lock.name or f"a name of task {lock.task} that its arguments make"
            yield key
        if lock.kind == "name" and lock.job is not None:
            yield f"for {lock.job} {lock.period}"
        holder = lock.node or lock.application or "a session without application_name"
        parts = [f"held by {holder}", f"backend {lock.pid}"]
        if lock.since is not None:
            parts.append(f"since {moments.told(lock.since, self.zone)}")
        elif lock.session_since is not None:
            parts.append(f"not before {moments.told(lock.session_since, self.zone)}")
        yield ", ".join(parts)
        if not lock.ours:
            yield "its session is not one of celery-pglock's"
        elif lock.kind is None:
            yield "its session is one of celery-pglock's, of another application or another name"
