"""What can be written for an action."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_mp import PlanError
from lightning_mp.callbacks import TrainingHealth


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"grad_norm_spikes": "log"}, "grad_norm_spike"),
        ({"loss_divergence": "stopp"}, "'stop'"),
        ({"loss_divergence": 3}, "'stop'"),
        ({"throughput_drop": "skip"}, "grad_norm_spike"),
        ({"nonfinite_loss": "skip"}, "NonFiniteGuard"),
    ],
)
def test_what_is_wrong_is_told_with_what_is_allowed(given: Any, named: str) -> None:
    with pytest.raises(PlanError, match=named):
        TrainingHealth(actions=given)
