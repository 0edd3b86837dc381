"""An application that was given the name of the script it was written in."""

from __future__ import annotations

from tests.apps import bad_settings

app = bad_settings.application("__main__")
