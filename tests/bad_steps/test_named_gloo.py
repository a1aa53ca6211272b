"""Gradients are summed, so that all ranks see what is not finite: the error names the rank whose own were bad."""

from typing import Any

import pytest
from torch import Tensor

from lightning_mp import LossScaling, NonFinite, NonFiniteError
from lightning_mp.numerics.grads import local
from support.models import InfiniteGradient
from support.ranks import Ranks
from support.sharded import BAD_RANK, HOSTS, Ranked, trained

pytestmark = pytest.mark.gloo
#: the module, or parameter, that is named
NAMED = {"batch": "net.0", "gradient": "net.3", "loss": "net.3", "hook": "net."}
CASES = [
    ("ddp", "bf16-mixed", "gradient"), ("ddp", "16-mixed", "loss"), ("ddp", "32-true", "hook"),
    ("fsdp1", "bf16-mixed", "batch"), ("fsdp2", "bf16-mixed", "batch"), ("fsdp2", "16-mixed", "gradient"),
    ("fsdp2", "bf16-mixed", "hook"), ("zero2", "bf16-mixed", "gradient"), ("zero3", "bf16-mixed", "batch"),
]  # fmt: skip


class Sick(Ranked):
    """From step 2 on rank ``BAD_RANK`` has a bad batch, gradient of the last layer, or loss, or a hook spoils one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def guilty(self, how: str) -> bool:
        return how == self.how and self.global_rank == BAD_RANK and self.trainer.global_step >= 2

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.net[1](self.net[0](x * float("nan") if self.guilty("batch") else x)).relu()
        if self.guilty("gradient"):
            hidden = InfiniteGradient.apply(hidden)
        loss = (self.net[3](hidden).float() - y).pow(2).mean()
        return loss * float("nan") if self.guilty("loss") else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters() if self.guilty("hook") else ():
            if parameter.grad is not None:
                local(parameter.grad).fill_(float("inf"))


def stopped(host: str, mode: str, how: str) -> dict[str, Any]:
    """The error that each rank's run ends with, two skips being allowed."""
    options = {"loss_scaling": LossScaling.static(64.0), "nonfinite": NonFinite(max_consecutive=2)}
    try:
        trained(mode, HOSTS[host](), Sick(how), **options)
    except NonFiniteError as error:
        return {**vars(error), "said": str(error)}
    return {}


@pytest.mark.parametrize(("host", "mode", "how"), CASES)
def test_every_rank_names_the_guilty_one(ranks: Ranks, host: str, mode: str, how: str) -> None:
    one, other = ranks.call(stopped, host, mode, how)
    assert one == other
    assert (one["rank"], one["step"]) == (BAD_RANK, 4)
    named = one["parameter"] if how == "hook" else one["module"]
    assert named.startswith(NAMED[how])
    assert ("changed after the backward pass" in one["said"]) == (how == "hook")
