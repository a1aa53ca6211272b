from collections.abc import Iterator

import pytest

from support.ranks import Ranks


@pytest.fixture(scope="package")
def four() -> Iterator[Ranks]:
    """Four processes."""
    with Ranks(4) as started:
        yield started
