"""What is advised, in terms of what the run has: a plan's own fields, or callbacks beside Lightning's plugins."""

from __future__ import annotations

from collections.abc import Iterable


def pinning(patterns: Iterable[str], *, under_plan: bool, dtype: str = "fp32") -> str:
    """How modules are stored and run in ``dtype``, as it is written in Python."""
    pins = "{" + ", ".join(f"{pattern!r}: {dtype!r}" for pattern in patterns) + "}"
    return f"pins={pins}, before any other pin" if under_plan else f"DtypePinning({pins})"
