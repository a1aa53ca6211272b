"""What the tests share: small real models, real fits, real processes, and a counter of host reads."""

from __future__ import annotations

from functools import cache
from importlib import metadata

# Whenever a Trainer is made, Lightning asks for the callbacks of all installed packages, and this package for the
# releases it stands on: both parse metadata, a third of a short run. What is installed does not change while tests run.
metadata.entry_points = cache(metadata.entry_points)
metadata.version = cache(metadata.version)
