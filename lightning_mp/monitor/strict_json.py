"""JSON as its standard has it: a float that is not finite becomes null, never ``NaN``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """``values`` as strict JSON."""
    return json.dumps(_finite(values), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return None if isinstance(value, float) and not math.isfinite(value) else value
