"""How the report writes numbers: short, and the same everywhere."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float) -> str:
    """Four significant digits, whole numbers with separators, powers of ten only where they are shorter."""
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def power_of_two(value: float) -> str:
    """``2¹⁶`` for a power of two, which a loss scale nearly always is."""
    mantissa, exponent = math.frexp(value)
    return f"2{str(exponent - 1).translate(_RAISED)}" if mantissa == 0.5 else number(value)


def counted(count: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def plain(value: Any) -> str:
    """A value out of a JSON file in a few words; what is nested in it is left out."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value) if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return ", ".join("…" if isinstance(item, (list, dict)) else plain(item) for item in value)
    return "…" if isinstance(value, dict) else str(value)


def moment(value: str) -> str:
    """A date and time of ISO 8601 as one reads it; anything else stays as it is."""
    try:
        return datetime.fromisoformat(value).strftime("%d %b %Y %H:%M %Z").strip().lstrip("0")
    except ValueError:
        return value
