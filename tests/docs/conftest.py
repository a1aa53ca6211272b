"""What a page sets for the whole process is put back after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_mp.numerics.device import set_tf32


@pytest.fixture(autouse=True)
def torchs_switches() -> Iterator[None]:
    """TF32, which the pages for users of stock Lightning set by torch's own call."""
    restore = set_tf32("highest")
    yield
    restore()
