"""What the tests share: small real models, real fits, real processes, and a counter of host reads."""

from functools import cache
from importlib import metadata

# Lightning asks for callbacks of installed packages whenever a Trainer is made, which reads the metadata of every
# package: a fifth of a short run. What is installed does not change while tests run.
metadata.entry_points = cache(metadata.entry_points)
