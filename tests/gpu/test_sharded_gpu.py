"""FSDP2 and FSDP1 on one CUDA device with NCCL: the same as on a single device, and what is stored and gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_mp import LossScaling, MixedPrecisionPlan, make_strategy
from support.gloo import run_ranks
from support.models import Regression, weights
from support.running import fit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODES = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compiled blocks": {"compile": True},
    "offloaded": {"cpu_offload": True},
    "prefetched": {"prefetch": 1},
}


def _plan(mode: str) -> MixedPrecisionPlan:
    scaling = LossScaling(init_scale=256.0) if mode.startswith("16") else None
    return MixedPrecisionPlan(mode, pins={"LayerNorm": "fp32"}, loss_scaling=scaling)


def _trained(mode: str, name: str | None, options: dict[str, Any]) -> dict[str, Any]:
    plan, module = _plan(mode), Regression(lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, fused=True))
    strategy = {} if name is None else {"strategy": make_strategy(name, plan, wrap="Linear", **options)}
    fit(module, plugins=[plan], accelerator="cuda", devices=1, gradient_clip_val=1.0, **strategy)
    whole = {key: getattr(value, "full_tensor", lambda value=value: value)() for key, value in weights(module).items()}
    return {
        "weights": {key: value.float().cpu().numpy() for key, value in whole.items()},
        "dtypes": {key: str(value.dtype) for key, value in whole.items()},
        "counts": (plan.applied_steps, plan.skipped_steps),
        "scale": None if plan.scaler is None else plan.scaler.get_scale(),
    }


def both(mode: str, name: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """One device, and the same under a sharded strategy; run in a process of its own with a process group."""
    return [_trained(mode, None, {}), _trained(mode, name, options)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", MODES)
def test_fsdp2_is_the_same_as_one_device(mode: str, form: str) -> None:
    ((single, sharded),) = run_ranks(both, mode, "fsdp2", FORMS[form], world=1)
    _same(single, sharded)


@pytest.mark.parametrize("mode", MODES)
def test_fsdp1_is_the_same_as_one_device(mode: str) -> None:
    ((single, sharded),) = run_ranks(both, mode, "fsdp1", {}, world=1)
    sharded["weights"] = {key.replace("_fsdp_wrapped_module.", ""): value for key, value in sharded["weights"].items()}
    sharded["dtypes"] = {key.replace("_fsdp_wrapped_module.", ""): value for key, value in sharded["dtypes"].items()}
    _same(single, sharded)


def _same(single: dict[str, Any], sharded: dict[str, Any]) -> None:
    assert single["counts"] == sharded["counts"]
    assert single["scale"] == sharded["scale"]
    assert single["dtypes"] == sharded["dtypes"]
    for key, value in single["weights"].items():
        # one rank: nothing is summed in another order, only the norm of clipping is
        assert value == pytest.approx(sharded["weights"][key], rel=1e-2, abs=1e-4), key
