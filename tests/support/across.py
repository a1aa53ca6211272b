"""Runs that are saved under one strategy and go on under another; the tests look at what came back."""

from __future__ import annotations

#: how long a run is, the step it is saved at, and the steps that overflow: two before, one after
STEPS, AT, OVERFLOWS = 12, 5, (1, 3, 6)
