from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lightning_mp.monitor.strict_json import to_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def _refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def _nulled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _nulled(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_nulled(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@given(st.dictionaries(st.text(), VALUES))
def test_every_strict_reader_takes_it_and_what_is_not_finite_is_null(values: dict[str, Any]) -> None:
    assert json.loads(to_json(values), parse_constant=_refuse) == _nulled(values)
