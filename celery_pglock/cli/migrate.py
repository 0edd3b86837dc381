"""``pglock migrate``: create or update the tables."""

from __future__ import annotations

import contextlib

import click

from celery_pglock import connections, errors, migrating, schema, sessions, settings, stacks
from celery_pglock.cli import documents, index_builds, progress, session, switches, terminal

_FAILED = 1


@click.command(name="migrate")
@click.option("--sql", is_flag=True, help="Print the SQL of all steps and change nothing.")
@click.option("--check", is_flag=True, help="Change nothing; exit 1 when something is missing.")
@switches.verbose
@switches.as_json
@click.pass_context
def command(ctx: click.Context, *, sql: bool, check: bool, verbose: bool, as_json: bool) -> None:
    """Create or update the tables of the ledger.

    May be run as often as one likes, and on many machines at once.
    """
    config = ctx.obj.settings
    if sql + check + (sql and as_json) > 1:
        msg = "--sql prints SQL alone: give it without --check and without --json"
        raise click.UsageError(msg)
    if sql:
        click.echo(schema.script(config.schema))
    elif check:
        _check(ctx, config, as_json=as_json)
    else:
        _migrate(config, verbose=verbose, as_json=as_json)


def _check(ctx: click.Context, config: settings.Settings, *, as_json: bool) -> None:
    fault = None
    try:
        schema.verify(session.target(config), config.schema)
    except errors.SchemaError as error:
        if not as_json:
            raise
        fault = str(error)
    if as_json:
        documents.write({**_document(config, []), "fault": fault}, config.zone)
        ctx.exit(0 if fault is None else _FAILED)
    _say_up_to_date(config)


def _migrate(config: settings.Settings, *, verbose: bool, as_json: bool) -> None:
    target = session.target(config)
    with contextlib.ExitStack() as stack:
        tell = stack.enter_context(progress.shown(verbose=verbose))
        builds = index_builds.Builds(target, config.schema, tell)
        if tell is not progress.untold:
            stack.enter_context(builds.watched())

        def begun(step: schema.Migration) -> None:
            builds.step = step.name
            tell(f"applying {step.name}")

        applied = migrating.migrate(target, config.schema, begun=begun)
    if as_json:
        found = _pooler(target)
        mode = "transaction" if isinstance(found, errors.TransactionPooler) else "session"
        document = {**_document(config, applied), "pooler": mode if found else None}
        documents.write(document, config.zone)
        return
    for name in applied:
        terminal.say(f"applied {name}")
    _say_up_to_date(config)
    if applied:
        click.echo(
            "\nA role that only runs workers and beats needs:\n" + schema.grants(config.schema)
        )
    pooler = _pooler(target)
    if isinstance(pooler, errors.TransactionPooler):
        click.echo(f"Warning: {pooler}.", err=True)
    elif pooler:
        terminal.say("The database is behind a pooler in session mode: locks hold.")


def _say_up_to_date(config: settings.Settings) -> None:
    terminal.say(f'schema "{config.schema}" is up to date')


def _document(config: settings.Settings, applied: list[str]) -> dict[str, object]:
    return {
        "schema": config.schema,
        "applied": applied,
        "fault": None,
        "pooler": None,
        "grants": schema.grants(config.schema).splitlines(),
    }


def _pooler(target: connections.Target) -> errors.TransactionPooler | bool:
    """Return whether a pooler stands before the server; what is to be said of one that spoils locks."""
    plan = sessions.Plan(target=target, level="session", application="pglock:migrate")
    try:
        opened = stacks.open_session(plan)
    except errors.TransactionPooler as error:
        return error
    opened.close()
    return opened.pooled
