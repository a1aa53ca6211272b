"""The expression that builds a piece of a policy again: its ``repr``."""

from __future__ import annotations

from dataclasses import MISSING, fields
from math import inf
from typing import Any


def expression(self: Any) -> str:
    """``Name(field=value)`` with the fields that are not at their defaults; a dataclass's ``__repr__``."""
    values = {item.name: (getattr(self, item.name), item.default) for item in fields(self)}
    given = {name: value for name, (value, default) in values.items() if default is MISSING or value != default}
    return call(type(self).__name__, given)


def call(name: str, arguments: dict[str, Any], *positional: Any) -> str:
    """A call of ``name`` as Python reads it."""
    keywords = [f"{key}={_value(value)}" for key, value in arguments.items()]
    return f"{name}({', '.join([*map(_value, positional), *keywords])})"


def _value(value: Any) -> str:
    return "float('inf')" if value == inf else repr(value)
