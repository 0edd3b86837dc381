"""How long one example of a property may take says nothing on a machine that others use too."""

from __future__ import annotations

import hypothesis

hypothesis.settings.register_profile("unit", deadline=None)
hypothesis.settings.load_profile("unit")
