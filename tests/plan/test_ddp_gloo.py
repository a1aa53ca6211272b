"""The plan under DDP, in two real processes: ranks agree on every step, and one rank's overflow is everybody's skip."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import LossScaling, MixedPrecisionPlan, PlanError
from lightning_mp.compat.lightning import Trainer
from lightning_mp.plan import plan as precision
from lightning_mp.policy.hardware import Device
from support.models import FEATURES, Regression, batches
from support.oracles import plan_for
from support.ranks import Ranks
from support.running import fit
from support.running import trainer as quiet_trainer
from support.sharded import ddp, on, rank, under

pytestmark = pytest.mark.gloo
BF16_LEAST, FP16_LEAST = 2.0**-133, 2.0**-24  # half of either is zero in its own dtype


class Constant(LightningModule):
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
    if differs == "precision":
        return MixedPrecisionPlan(("bf16-mixed", "16-mixed")[rank()])
    if differs == "init_scale":
        return MixedPrecisionPlan("16-mixed", loss_scaling=LossScaling(init_scale=2.0 ** (16 - 6 * rank())))
    return MixedPrecisionPlan({"auto": "auto", "a device": "bf16-mixed"}.get(differs, "32-true"))


def module(differs: str) -> Any:
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
    options: dict[str, Any] = {"device_mesh": (2, 1)} if host == "hsdp" else {}
    return quiet_trainer(**({"plugins": [plan], **on("ddp")} if host == "stock_ddp" else under(host, plan, **options)))


def differ(host: str, differs: str) -> str:
    described = precision.describe
    if differs in ("auto", "a device"):
        precision.describe = lambda _device: DEVICES[rank()]  # type: ignore[assignment]
    try:
        trainer(host, plan(differs)).fit(module(differs), batches())
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
    one, other = two.call(differ, host, differs)
    assert one == other
    assert TOLD[differs] in one, one
