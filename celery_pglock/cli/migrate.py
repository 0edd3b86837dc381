"""``pglock migrate``: create or update the tables."""

from __future__ import annotations

import click

from celery_pglock import connections, errors, schema, sessions, stacks


@click.command(name="migrate")
@click.option("--sql", is_flag=True, help="Print the SQL of all steps and change nothing.")
@click.option("--check", is_flag=True, help="Change nothing; exit 1 when something is missing.")
@click.pass_context
def command(ctx: click.Context, *, sql: bool, check: bool) -> None:
    """Create or update the tables of the ledger.

    May be run as often as one likes, and on many machines at once.
    """
    config = ctx.obj.settings
    if sql:
        click.echo(schema.script(config.schema))
        return
    target = config.target()
    if check:
        schema.verify(target, config.schema)
        click.echo(f'schema "{config.schema}" is up to date')
        return
    applied = schema.migrate(target, config.schema)
    for name in applied:
        click.echo(f"applied {name}")
    click.echo(f'schema "{config.schema}" is up to date')
    if applied:
        click.echo(
            "\nA role that only runs workers and beats needs:\n" + schema.grants(config.schema)
        )
    _say_pooler(target)


def _say_pooler(target: connections.Target) -> None:
    plan = sessions.Plan(target=target, level="session", application="pglock:migrate")
    try:
        session = stacks.open_session(plan)
    except errors.TransactionPooler as error:
        click.echo(f"Warning: {error}.", err=True)
        return
    if session.pooled:
        click.echo("The database is behind a pooler in session mode: locks hold.")
    session.close()
