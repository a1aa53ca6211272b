"""A pipeline whose ranks wait for much of a step."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_mp import MixedPrecisionPlan, make_strategy
from support.doctor import found, net

PLAN = MixedPrecisionPlan("32-true")


@pytest.mark.parametrize(
    ("given", "devices", "share"),
    [
        ({"stages": 2, "microbatches": 2}, 2, "33%"),
        ({"microbatches": 8, "schedule": "gpipe"}, 8, "47%"),
        ({"stages": 4, "microbatches": 4, "schedule": "interleaved_1f1b"}, 8, "27%"),
        ({"stages": 8}, 8, None),
        ({"stages": 2, "microbatches": 2}, "auto", None),
        ({"stages": 3}, 4, None),  # refused by the run itself
    ],
)
def test_it_says_for_how_much_of_a_step(given: dict[str, Any], devices: Any, share: str | None) -> None:
    findings = found(net(), PLAN, make_strategy("pipeline", PLAN, **given), {"devices": devices})
    if share is None:
        assert "pipeline_bubble" not in findings
    else:
        assert findings["pipeline_bubble"].what.endswith(f"wait for {share} of a step")
        assert findings["pipeline_bubble"].severity == "info"
