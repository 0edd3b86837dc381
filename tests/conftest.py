"""The list of fixture plugins, and the signals as a terminal would have them."""

from __future__ import annotations

import collections
import signal
import sys
from importlib.metadata import version

import pytest
from packaging.version import Version

pytest_plugins = [
    "celery_pglock.testing",
    "tests.support.requirements",
    "tests.support.servers",
    "tests.support.browser",
    "tests.support.clocks",
    "tests.support.commands",
    "tests.support.databases",
    "tests.support.processes",
    "tests.support.pgbouncer",
    "tests.support.guides",
    "tests.support.stage",
    "tests.support.django_site",
]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell. What the tests start would inherit that and not be
    # ended by Ctrl+C, as it is at a terminal.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # after pytest's own hook is in its place
def pytest_configure(config: pytest.Config) -> None:
    """Leave Redis's sockets to the garbage collector where Celery does; a later one closes them."""
    if min(Version(version(name)) for name in ("celery", "kombu")) < Version("5.7"):
        config.addinivalue_line("filterwarnings", "ignore:unclosed <socket:ResourceWarning")
        _forgive_unclosed_sockets()


def _forgive_unclosed_sockets() -> None:
    """Leave them out also where no filter is in force.

    In another thread the collector may find one while pytest puts the filters of a test in their
    places one by one, or while the threads of a test have mixed up theirs with pytest's.
    """
    told = sys.unraisablehook

    def tell(what: sys.UnraisableHookArgs) -> None:
        unclosed = isinstance(what.exc_value, ResourceWarning) and "<socket" in str(what.exc_value)
        if not unclosed:
            told(what)

    sys.unraisablehook = tell


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that the last one does not run alone."""
    slow = collections.Counter(item.path for item in items if item.get_closest_marker("slow"))
    # Stable: otherwise in the random order that the plugin has made.
    items.sort(key=lambda item: -slow[item.path])
