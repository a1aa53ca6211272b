"""The format version of this package's files, and a JSON reader that never raises."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_mp.errors import is_whole

if TYPE_CHECKING:
    from typing_extensions import TypeIs

#: the key of the version in a file; a file without the key is of version 1
KEY = "format_version"
#: increased if a key changes its meaning or is removed, not for a new key
VERSION = 1
#: the key of a Lightning checkpoint under which this package keeps its own entries
NOTES = "lightning_mp"
#: the advice for a file of a newer version
UPDATE = "update lightning-mp"


def stamped(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with the format version in front."""
    return {KEY: VERSION, **values}


def newer(values: object) -> str:
    """Return a message if ``values`` have a newer format version; else an empty string."""
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
    except (ValueError, RecursionError):  # RecursionError: thousands of nested brackets
        return None
    return value if isinstance(value, dict) else None


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) < len(str(2**63)) else float(digits)


def is_step(value: object) -> TypeIs[int]:
    """True if ``value`` is a whole number from 0 to below 2**53, the largest that the charts' JavaScript counts to."""
    return is_whole(value) and 0 <= value < 2**53
