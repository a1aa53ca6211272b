"""The user's own ``clip_grad_norm_`` where each rank holds a piece: it clips by the norm of all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad, clip_grad_norm_

from support.comparing import same
from support.models import Regression
from support.ranks import Ranks
from support.sharded import ddp, fsdp1, fsdp2, trained

pytestmark = pytest.mark.gloo

SGD_ = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Clipped(Regression):
    """Clips by itself."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip_grad_norm_(self.parameters(), 0.05)
        self.lrs.append(float(clip_grad_norm_(list(self.net[0].parameters()), 10.0, norm_type=float("inf"))))


@dataclass(frozen=True)
class Clips:
    host: str

    def run(self) -> Any:
        found = trained("32-true", {"ddp": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2}[self.host](), Clipped(SGD_))
        return {key: found[key] for key in ("weights", "lrs")} | {"restored": clip_grad._get_total_norm.__module__}


@pytest.mark.parametrize("host", ["fsdp1", "fsdp2"])
def test_the_users_own_clip_grad_norm_takes_the_norm_of_all_shards(ranks: Ranks, host: str) -> None:
    for found, expected in zip(ranks.run(Clips(host)), ranks.run(Clips("ddp")), strict=True):
        assert same(found["weights"], expected["weights"], 1e-5)
        assert found["restored"] == expected["restored"]
        if host == "fsdp1":  # of FSDP2's norm, a DTensor, float() reads this rank's
            assert same(found["lrs"], expected["lrs"], 1e-5)
