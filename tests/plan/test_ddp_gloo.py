"""The plan under DDP, in two real processes: ranks agree on every step, and one rank's overflow is everybody's skip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import LossScaling
from support.oracles import plan_for
from support.ranks import Ranks
from support.running import fit
from support.sharded import Ranked, ddp, refused

pytestmark = pytest.mark.gloo

BF16_LEAST, FP16_LEAST = 2.0**-133, 2.0**-24  # half of either is zero in its own dtype


class Constant(LightningModule):
    """One weight whose gradient is a chosen number a rank."""

    def __init__(self, *gradients: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.chosen = gradients

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.weight * torch.full_like(self.weight, self.chosen[self.global_rank])).sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.averaged = self.weight.grad.double().tolist()

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=1.0)


@dataclass(frozen=True)
class Reduced:
    """The averaged gradient of two ranks."""

    mode: str
    gradients: tuple[float, float]
    reduce_dtype: str | None = None

    def run(self) -> list[float]:
        module = Constant(*self.gradients)
        options = {"reduce_dtype": self.reduce_dtype} if self.reduce_dtype else {}
        plan = plan_for(self.mode, LossScaling.static(1.0), **options)
        fit(module, data=DataLoader(TensorDataset(torch.zeros(1)), batch_size=1), **ddp(), plugins=[plan])
        return module.averaged


@pytest.mark.parametrize(
    ("reduced", "average"),
    [
        # Averaged in fp32, as declared: the mean of two equal numbers is that number.
        (Reduced("bf16-true", (BF16_LEAST, BF16_LEAST)), BF16_LEAST),
        (Reduced("16-true", (FP16_LEAST, FP16_LEAST)), FP16_LEAST),
        # Averaged in its own dtype it is lost, which shows that the numbers tell the two apart.
        (Reduced("bf16-true", (BF16_LEAST, BF16_LEAST), "bf16"), 0.0),
        (Reduced("bf16-mixed", (1.0, 2.0**-9)), 0.5 + 2.0**-10),
        (Reduced("bf16-mixed", (1.0, 2.0**-9), "bf16"), 0.5),
    ],
    ids=lambda value: f"{value.mode} {value.reduce_dtype}" if isinstance(value, Reduced) else "",
)
def test_gradients_are_averaged_in_reduce_dtype(ranks: Ranks, reduced: Reduced, average: float) -> None:
    assert ranks.run(reduced) == [[average] * 4] * 2


class Replaces(Ranked):
    def on_train_epoch_start(self) -> None:
        self.net[3] = nn.Linear(*self.net[3].weight.shape[::-1])


@dataclass(frozen=True)
class Replaced:
    """What is said where a pinned layer is replaced in the run."""

    def run(self) -> str:
        return refused(lambda: fit(Replaces(), plugins=[plan_for("bf16-mixed", pins={"net.3": "fp32"})], **ddp()))


def test_a_pinned_module_is_not_replaced_where_ddp_sums_the_old_ones_gradients(ranks: Ranks) -> None:
    assert all("'net.3', pinned to fp32 ('net.3'), was replaced in the run" in said for said in ranks.run(Replaced()))
