"""Ways in which public projects write Lightning code: under a plan each ends as under stock Lightning, or is refused.

By day each idiom runs on one device in one mode, and a tenth of them in two processes under each strategy. The names
of the idioms draw which. ``make test-whole`` runs every cell.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from idioms.cells import IDIOMS, verdict
from idioms.table import MODES, STRATEGIES
from support.cells import WHOLE
from support.ranks import Ranks

pytestmark = pytest.mark.gloo
#: what a cell may end in
EXPECTED = ("equal", "refused", "differs", "finding")


def cells() -> Iterator[Any]:
    for name, entry in IDIOMS.items():
        drawn = crc32(name.encode())
        for number, strategy in enumerate(STRATEGIES):
            modes = [mode for mode in MODES if not entry.of(entry.left_out, strategy, mode)]
            often = strategy == "single" or (drawn + number) % 10 == 0
            for place, mode in enumerate(modes):
                by_day = often and place == (drawn // 10 + number) % len(modes)
                yield pytest.param(name, strategy, mode, marks=[] if by_day else WHOLE)


@pytest.fixture(scope="module")
def one_device() -> Iterator[Ranks]:
    with Ranks(1) as started:
        yield started


@pytest.mark.parametrize(("name", "strategy", "mode"), list(cells()))
def test_an_idiom_ends_as_under_stock_lightning_or_is_refused(
    name: str, strategy: str, mode: str, ranks: Ranks, one_device: Ranks, tmp_path: Path
) -> None:
    ended = verdict(one_device if strategy == "single" else ranks, name, strategy, mode, tmp_path)
    assert ended.word in EXPECTED, f"{ended.word}: {ended.why}"
