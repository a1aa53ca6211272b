"""The format version of the files that this package writes, and reading their JSON whatever is in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_mp.errors import is_whole

if TYPE_CHECKING:
    from typing_extensions import TypeIs

#: the key of the version in a file; a file without it is of version 1 too
KEY = "format_version"
#: raised when a key changes its meaning or goes away; a new key alone does not raise it
VERSION = 1
#: the key of a checkpoint under which this package adds to Lightning's own
NOTES = "lightning_mp"
#: what to do about a newer file
UPDATE = "update lightning-mp"


def stamped(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with the format version in front."""
    return {KEY: VERSION, **values}


def newer(values: object) -> str:
    """Return what to say of ``values`` of a newer format version; empty if this package reads them."""
    version: object = values.get(KEY) if isinstance(values, Mapping) else None  # pyright: ignore
    if not is_whole(version) or version <= VERSION:
        return ""
    return f"has format version {version}, and this lightning-mp reads up to {VERSION}"


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object in ``text``; ``None`` if ``text`` is no JSON, or another kind of value.

    A whole number beyond 64 bits is a float, which may be infinite.
    """
    try:
        value: Any = json.loads(text, parse_int=_number)
    except (ValueError, RecursionError):  # the latter for brackets without end
        return None
    return value if isinstance(value, dict) else None


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) < len(str(2**63)) else float(digits)


def is_step(value: object) -> TypeIs[int]:
    """True if ``value`` may be the number of a step: JavaScript, which draws the charts, is exact up to 2**53."""
    return is_whole(value) and 0 <= value < 2**53
