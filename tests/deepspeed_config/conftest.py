"""What the tests of the DeepSpeed JSON share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def parse() -> Callable[[dict[str, Any]], Any]:
    """DeepSpeed's own reading of a config; without a process group it takes the world for one rank."""
    config = pytest.importorskip("deepspeed.runtime.config")
    return config.DeepSpeedConfig
