"""FSDP2, FSDP1 and DeepSpeed on one CUDA device with NCCL: the same as on a single device."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mp import LossScaling, MixedPrecisionPlan, make_strategy
from support.comparing import eps, of_training
from support.models import InfiniteGradient, Regression
from support.ranks import Ranks
from support.running import fit
from support.sharded import RATE, whole

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MODES = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
STEPS = 8
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compiled blocks": {"compile": True},
    "offloaded": {"cpu_offload": True},
}
HALF = ("deepspeed_zero1_half", "deepspeed_zero2_half")
ZERO = ("deepspeed_zero1", "deepspeed_zero2", *HALF)


class Overflows(Regression):
    """Infinite gradients that come from the output: a sharded weight can be read within its module alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.net(batch[0]).float()
        loss = (output - batch[1]).pow(2).mean()
        if self.trainer.global_step in self.overflow_at:
            loss = loss + InfiniteGradient.apply(output.sum() * 0)
        return loss


def _plan(mode: str, pinned: bool) -> MixedPrecisionPlan:
    scaling = LossScaling(init_scale=256.0) if mode.startswith("16") else None
    return MixedPrecisionPlan(mode, pins={"LayerNorm": "fp32"} if pinned else None, loss_scaling=scaling)


def _trained(mode: str, name: str | None, options: dict[str, Any], pinned: bool) -> dict[str, Any]:
    optimizer, bad = options.pop("optimizer", torch.optim.AdamW), options.pop("overflow_at", ())
    plan = _plan(mode, pinned)
    module = Overflows(lambda p: optimizer(p, lr=RATE, eps=1e-4, fused=True), overflow_at=bad)
    if name is not None and name not in ZERO:
        options = {"wrap": "Linear", **options}
    strategy = {} if name is None else {"strategy": make_strategy(name, plan, **options)}
    # a distributed sampler draws in another order, also on one rank
    same_order = {"devices": 1, "use_distributed_sampler": False}
    fit(module, plugins=[plan], accelerator="cuda", gradient_clip_val=1.0, **same_order, **strategy)
    held = whole(module)
    return {
        "weights": {key: value.float().cpu().numpy() for key, value in held.items()},
        "dtypes": {key: str(value.dtype) for key, value in held.items()},
        "counts": (plan.applied_steps, plan.skipped_steps),
        "scale": None if plan.scaler is None else plan.scaler.get_scale(),
    }


def both(mode: str, name: str, options: Any = ()) -> list[dict[str, Any]]:
    options, pinned = dict(options), name != "fsdp1"
    shared = {key: options[key] for key in ("optimizer", "overflow_at") if key in options}
    return [_trained(mode, None, shared, pinned), _trained(mode, name, options, pinned)]


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    with Ranks(1) as started:
        yield started


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", MODES)
def test_fsdp2_is_the_same_as_one_device(alone: Ranks, mode: str, form: str) -> None:
    ((single, sharded),) = alone.call(both, mode, "fsdp2", FORMS[form])
    _same(mode, single, sharded)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam])  # others are not fused, or not sharded
def test_an_offloaded_fused_optimizer_leaves_a_bad_step_out(alone: Ranks, optimizer: Any) -> None:
    """Its kernel runs on the CPU, and the flag comes from the device."""
    options = {"cpu_offload": True, "optimizer": optimizer, "overflow_at": (2, 5)}
    ((single, sharded),) = alone.call(both, "32-true", "fsdp2", options)
    assert single["counts"] == (6, 2)
    _same("32-true", single, sharded)


@pytest.mark.parametrize("mode", MODES)
def test_fsdp1_is_the_same_as_one_device(alone: Ranks, mode: str) -> None:
    ((single, sharded),) = alone.call(both, mode, "fsdp1")
    _same(mode, single, sharded)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize(
    ("mode", "name"), [(mode, name) for name in ZERO for mode in MODES if mode.endswith("mixed") or name not in HALF]
)
def test_zero_is_the_same_as_one_device(alone: Ranks, mode: str, name: str) -> None:
    ((single, sharded),) = alone.call(both, mode, name)
    _same(mode, single, sharded)


def _same(mode: str, single: dict[str, Any], sharded: dict[str, Any]) -> None:
    """One rank: nothing is summed in another order, but for the norm of clipping."""
    assert single["counts"] == sharded["counts"]
    assert single["scale"] == sharded["scale"]
    assert single["dtypes"] == sharded["dtypes"]
    stored = eps(mode) if mode.endswith("true") else 0.0  # a weight may be the next one up or down, at every step
    for key, value in single["weights"].items():
        within = of_training(mode, RATE) + STEPS * stored
        assert value == pytest.approx(sharded["weights"][key], rel=within, abs=within), key
