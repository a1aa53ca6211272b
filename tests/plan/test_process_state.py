"""Complaint 7 (PL 21256), and the rest of what a plugin could leave behind in the process: nothing, on any exit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch._functorch import config as functorch_config

from lightning_mp import MixedPrecisionPlan
from support.models import Regression
from support.oracles import MODES, plan_for
from support.running import fit
from support.traces import lightning_says

every_mode = pytest.mark.parametrize("mode", MODES)


def _state() -> dict[str, Any]:
    """Every process-wide setting a precision plugin may touch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "matmul": torch.get_float32_matmul_precision(),
            "cuda.matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
            "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
            "default dtype": torch.get_default_dtype(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "autocast dtype": torch.get_autocast_dtype("cpu"),
            "autocast cache": torch.is_autocast_cache_enabled(),
            "autocast in compiled backward passes": functorch_config.backward_pass_autocast,
            "grad": torch.is_grad_enabled(),
            "forward hooks": len(torch.nn.modules.module._global_forward_hooks),
        }


PLACES = ("configure_optimizers", "on_train_start", "training_step", "on_after_backward")
PLACES += ("on_before_optimizer_step", "on_train_end")


def _failing(where: str) -> Regression:
    """Raises in this hook, after two batches if it has got one."""

    def fails(self: Any, *given: Any) -> Any:
        if where == "training_step" and given[1] < 2:
            return Regression.training_step(self, *given)
        raise KeyError("planned")

    return type("Fails", (Regression,), {where: fails})()


@pytest.mark.parametrize("where", PLACES)
@every_mode
def test_everything_is_as_before_however_the_run_ends(mode: str, where: str) -> None:
    before = _state()
    with pytest.raises(KeyError, match="planned"):
        fit(_failing(where), plugins=[plan_for(mode, tf32="high")])
    assert _state() == before


@pytest.mark.parametrize("tf32", ["high", "medium", "highest", True, False])
def test_on_a_cpu_tf32_changes_nothing_and_says_so(tf32: Any) -> None:
    """One config must serve laptop and cluster (DESIGN section 2, small print)."""

    class Looks(Regression):
        def on_train_start(self) -> None:
            self.met = _state()

    before, module, plain = _state(), Looks(), Regression()
    with lightning_says() as lines:
        fit(module, plugins=[MixedPrecisionPlan("32-true", tf32=tf32)])
    assert {**module.met, "grad": True} == {**before, "grad": True}
    assert _state() == before
    assert sum("it has no TF32" in line for line in lines) == 1
    fit(plain, precision="32-true")
    assert module.losses == plain.losses


@pytest.mark.parametrize("mode", ["bf16-mixed", "16-mixed"])
def test_autocast_is_on_in_the_forward_and_off_in_the_backward(mode: str) -> None:
    """PyTorch recommends no autocast in the backward, and a pinned module's backward must not be cast down by it."""

    class Looks(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.inside = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
            loss = super().training_step(batch, batch_idx)
            loss.register_hook(self._backward)
            if not self.automatic_optimization:
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def _backward(self, gradient: Any) -> None:
            self.in_backward = torch.is_autocast_enabled("cpu")

    for automatic in (True, False):
        module = Looks()
        module.automatic_optimization = automatic
        fit(module, plugins=[plan_for(mode)], max_steps=1)
        assert module.inside == (True, False)  # without the cache, as in stock Lightning (complaint 9, PL 21611)
        assert module.in_backward is False, f"automatic_optimization={automatic}"
