"""Fixtures of every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two processes that run the cases of a test module; they start with its first case."""
    with Ranks() as started:
        yield started
