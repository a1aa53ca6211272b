"""Two ranks whose plans or modules differ: each ends before the first step, with the same sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mp import LossScaling, MixedPrecisionPlan, PlanError, make_strategy
from lightning_mp.compat.lightning import Trainer
from lightning_mp.plan import plan as precision
from lightning_mp.policy.hardware import Device
from support.models import FEATURES, Regression, batches
from support.ranks import Ranks
from support.running import trainer as quiet_trainer
from support.sharded import rank

pytestmark = pytest.mark.gloo

DEVICES = (
    Device("cuda", "Tesla V100", (7, 0), bf16="none", memory=2**34),
    Device("cuda", "NVIDIA A100", (8, 0), memory=2**36),
)
HOSTS = ("stock_ddp", "ddp", "fsdp1", "fsdp2", "hsdp", "pipeline", *(f"deepspeed_zero{stage}" for stage in (1, 2, 3)))
#: what differs → what every rank is told
TOLD = {
    "precision": "MixedPrecisionPlan('bf16-mixed') on rank 0; MixedPrecisionPlan('16-mixed') on rank 1",
    "init_scale": "LossScaling(init_scale=1024.0)) on rank 1",
    "auto": "for Tesla V100 on rank 0; MixedPrecisionPlan('32-true', tf32='high') for NVIDIA A100 on rank 1",
    "a layer": "it has 'net.0.weight' of (32, 16) in float32, trained, on rank 0; 'extra.weight' of (16, 16)",
    "a shape": "it has 'net.0.weight' of (32, 16) in float32, trained, on rank 0; 'net.0.weight' of (64, 16)",
    "frozen": "'net.0.weight' of (32, 16) in float32, frozen, on rank 1",
    "a buffer": "it has nothing more on rank 0; 'count' of () in float32, a buffer, on rank 1",
    "the meta device": "'net.0.weight' of (32, 16) in float32 on the meta device, trained, on rank 1",
    "a device": "precision='bf16-mixed' on Tesla V100 (cuda), on rank 0.",
}
#: the others move a module to the device, or from it, before or after the plan is asked, which fails for this one
TAKE_META = ("fsdp1", "fsdp2", "hsdp", "pipeline")
CASES = [*(("ddp", differs) for differs in TOLD if differs != "the meta device")]
CASES += [(host, differs) for host in HOSTS if host != "ddp" for differs in ("precision", "a layer")]
CASES += [(host, "the meta device") for host in TAKE_META]


def plan(differs: str) -> MixedPrecisionPlan:
    """This rank's."""
    if differs == "precision":
        return MixedPrecisionPlan(("bf16-mixed", "16-mixed")[rank()])
    if differs == "init_scale":
        return MixedPrecisionPlan("16-mixed", loss_scaling=LossScaling(init_scale=2.0 ** (16 - 6 * rank())))
    return MixedPrecisionPlan({"auto": "auto", "a device": "bf16-mixed"}.get(differs, "32-true"))


def module(differs: str) -> Any:
    """This rank's."""
    made: Any = Regression(torch.optim.SGD)
    if rank() == 1:
        if differs == "a layer":
            made.extra = nn.Linear(FEATURES, FEATURES)
            made.net = made._modules.pop("net")
        if differs == "a shape":
            made.net = nn.Sequential(nn.Linear(FEATURES, 64), nn.Linear(64, 1))
        made.net[0].requires_grad_(differs != "frozen")
        if differs == "a buffer":
            made.register_buffer("count", torch.zeros(()))
        if differs == "the meta device":
            made.net.to("meta")
    return made


def trainer(host: str, plan: MixedPrecisionPlan) -> Trainer:
    """One of two ranks."""
    options: dict[str, Any] = {"device_mesh": (2, 1)} if host == "hsdp" else {}
    strategy: Any = "ddp"
    if host != "stock_ddp":
        strategy = make_strategy(host, plan, timeout=timedelta(seconds=30), **options)
    return quiet_trainer(plugins=[plan], strategy=strategy, devices=2, use_distributed_sampler=False)


@dataclass(frozen=True)
class Differ:
    host: str
    differs: str

    def run(self) -> str:
        described = precision.describe
        if self.differs in ("auto", "a device"):
            precision.describe = lambda _device: DEVICES[rank()]  # type: ignore[assignment]
        try:
            trainer(self.host, plan(self.differs)).fit(module(self.differs), batches())
        except PlanError as error:
            return str(error)
        finally:
            precision.describe = described
        return "it ran"


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, seconds=40) as ranks:
        yield ranks


@pytest.mark.parametrize(("host", "differs"), CASES)
def test_every_rank_is_told_what_differs(host: str, differs: str, two: Ranks) -> None:
    one, other = two.run(Differ(host, differs))
    assert one == other
    assert TOLD[differs] in one, one
