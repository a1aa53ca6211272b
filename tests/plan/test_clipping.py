"""Complaint 2 (PL 21435, 18089): clipping acts on true gradients, fused optimizers included, and shows in p.grad."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from support.cells import sampled
from support.models import Regression, same_weights
from support.oracles import MODES, plan_for
from support.traces import gradients, traced

pytestmark = pytest.mark.older_cpu
CLIP = {"norm": 0.5, "value": 0.02}
every_mode = pytest.mark.parametrize("mode", MODES)


class Clipped(Regression):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.after_clipping: list[dict[str, Tensor]] = []
        self.after_step: list[dict[str, Tensor]] = []

    def configure_gradient_clipping(self, *arguments: Any, **options: Any) -> None:
        super().configure_gradient_clipping(*arguments, **options)
        self.after_clipping.append(gradients(self))

    def optimizer_step(self, *arguments: Any, **options: Any) -> None:
        super().optimizer_step(*arguments, **options)
        self.after_step.append(gradients(self))


def _norm(grads: dict[str, Tensor]) -> float:
    return torch.stack([gradient.float().norm() for gradient in grads.values()]).norm().item()


@pytest.mark.parametrize(("mode", "algorithm", "fused"), sampled(MODES, CLIP, (False, True)))
def test_hooks_see_true_gradients_and_p_grad_holds_clipped_ones_after(mode: str, algorithm: str, fused: bool) -> None:
    module, clip = Clipped(partial(AdamW, lr=1e-3, eps=1e-4, fused=fused)), CLIP[algorithm]
    options = {"gradient_clip_val": clip, "gradient_clip_algorithm": algorithm}
    trace = traced(module, plugins=[plan_for(mode)], **options)
    assert len(trace.seen) == len(module.after_clipping) == 8
    for before, after in zip(trace.seen, module.after_clipping, strict=True):
        if algorithm == "norm":
            assert _norm(before) > clip
            assert _norm(after) == pytest.approx(clip, rel=5e-3)
            factor = clip / _norm(before)
            expected = {name: gradient.float() * factor for name, gradient in before.items()}
        else:
            assert max(gradient.abs().max() for gradient in before.values()) > clip
            expected = {name: gradient.float().clamp(-clip, clip) for name, gradient in before.items()}
        tolerance = {"rtol": 1e-2, "atol": 1e-6} if mode.endswith("true") and mode[0] != "3" else {}
        for name, gradient in after.items():
            torch.testing.assert_close(gradient.float(), expected[name], **tolerance)
    assert all(same_weights(a, b) for a, b in zip(module.after_clipping, module.after_step, strict=True))
