"""Optimizers that round stochastically: ranks that hold whole weights round alike, whatever their generators."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mp import MixedPrecisionPlan
from support.models import Regression, same_weights, weights
from support.ranks import Ranks
from support.running import fit
from support.sharded import ddp

optim = pytest.importorskip("torchao.optim")
pytestmark = pytest.mark.gloo


@dataclass(frozen=True)
class Rounded:
    """Each rank's generator stands elsewhere, as without ``seed_everything``; what it drew next, with the weights."""

    def run(self) -> dict[str, Any]:
        torch.manual_seed(0)
        module = Regression(partial(optim._AdamW, lr=1e-3, bf16_stochastic_round=True))

        def on_train_start() -> None:
            torch.manual_seed(1 + module.global_rank)

        module.on_train_start = on_train_start  # type: ignore[method-assign]
        with torch.compiler.set_stance("force_eager"):
            fit(module, plugins=[MixedPrecisionPlan("bf16-true")], **ddp())
        drawn: Tensor = torch.rand(())
        torch.manual_seed(1 + module.global_rank)
        return {"weights": weights(module), "drawn": drawn, "expected": torch.rand(())}


def test_ranks_round_alike_and_their_own_generators_are_left_alone(ranks: Ranks) -> None:
    one, other = ranks.run(Rounded())
    assert same_weights(one["weights"], other["weights"])
    for found in (one, other):
        assert torch.equal(found["drawn"], found["expected"])
