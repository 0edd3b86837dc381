"""A command group that knows what a misspelt command was meant to be, whichever click there is."""

from __future__ import annotations

import click
from typing_extensions import override


class Group(click.Group):
    """Names the nearest command when there is none of that name."""

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        known = self.list_commands(ctx)
        if name not in known and not name.startswith("-") and not ctx.resilient_parsing:
            from celery_pglock.cli import names

            ctx.fail(f"No such command {name!r}; {names.nearest(name, known)}")
        return super().resolve_command(ctx, args)
