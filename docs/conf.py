"""How Sphinx builds the documentation; `make docs` does."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path

_project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

project = "celery-pglock"
author = "celery-pglock contributors"
copyright = f"2026, {author}"
release = version = _project["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

nitpicky = True
# The names of other projects: their inventories are on the network, and the build needs none.
nitpick_ignore_regex = [
    (r"py:.*", r"(celery|kombu|psycopg|sqlalchemy|click|typing_extensions)(\..*)?"),
    (r"py:.*", r"(collections|contextlib|datetime|pathlib|typing|uuid|zoneinfo)\..*"),
]


def _says_something(record: logging.LogRecord) -> bool:
    # A part of the documentation may have no page yet. Sphinx gives this warning no type, so
    # `suppress_warnings` cannot name it.
    return getattr(record, "subtype", None) != "empty_glob"


logging.getLogger("sphinx.sphinx.directives.other").addFilter(_says_something)

html_theme = "furo"
html_title = f"celery-pglock {release}"
