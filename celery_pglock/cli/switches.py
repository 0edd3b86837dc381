"""The options that many commands have, each spelt and explained once."""

from __future__ import annotations

from typing import Final

import click

as_json: Final = click.option(
    "--json", "as_json", is_flag=True, help="One JSON document; its schema is documented."
)
utc: Final = click.option(
    "--utc", is_flag=True, help="Times in UTC instead of the application's zone."
)
dry_run: Final = click.option(
    "--dry-run", is_flag=True, help="Say what would be done and do nothing."
)
yes: Final = click.option("--yes", is_flag=True, help="Do not ask, also on a terminal.")
verbose: Final = click.option(
    "--verbose", is_flag=True, help="Tell how far it is, also where nobody looks."
)
