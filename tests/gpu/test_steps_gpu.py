"""Steps on CUDA: dtypes, equality with stock Lightning, skips, clipping, resume, and no wait for the device."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW

from lightning_mp import Pin
from support.cuda import DEVICE, NothingWaits, Unread, cuda_fit
from support.models import Regression, same_weights
from support.oracles import MODES, SCALED, plan_for, stock_for
from support.pinning import pin
from support.saving import ResumableBatches, SaveAt
from support.traces import Trace, equal_states

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
#: mode -> parameters stored, matrix products
TABLE = {
    "32-true": (FP32, FP32), "bf16-mixed": (FP32, BF16), "16-mixed": (FP32, FP16), "bf16-true": (BF16, BF16),
    "16-true": (FP16, FP16),
}  # fmt: skip
OPTIMIZERS: dict[str, Any] = {
    "adamw-fused": partial(AdamW, lr=1e-2, eps=1e-4, fused=True),
    "adamw": partial(AdamW, lr=1e-2, eps=1e-4),
    "sgd-momentum-fused": partial(SGD, lr=1e-3, momentum=0.9, fused=True),
    "sgd-momentum": partial(SGD, lr=1e-3, momentum=0.9),
    "adagrad": partial(Adagrad, lr=1e-2, eps=1e-4),
}
every_mode = pytest.mark.parametrize("mode", MODES)


@pytest.mark.parametrize(("half", "dtype"), [("bf16", BF16), ("fp16", FP16)])
def test_a_wide_head_is_the_product_of_upcast_operands(half: str, dtype: torch.dtype) -> None:
    layer, rows = nn.Linear(512, 64, device=DEVICE), torch.randn(2, 32, 512, device=DEVICE)
    x, w, b = (one.detach().to(dtype).double() for one in (rows, layer.weight, layer.bias))
    root = pin(nn.Sequential(layer), [Pin("0", half, accumulate="fp32")], device="cuda")
    with torch.autocast("cuda", dtype):
        found = root(rows)
    assert found.dtype == FP32
    within = 512 * 2.0**-24 * (x.abs() @ w.abs().t() + b.abs())  # Higham, section 3.1
    assert bool(((found.double() - (x @ w.t() + b)).abs() <= within).all())


@every_mode
def test_dtypes_of_the_table(mode: str) -> None:
    class Looks(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            product = self.net(batch[0])
            self.met = product.dtype, product.softmax(1).dtype, nn.functional.mse_loss(product, batch[1]).dtype
            return super().training_step(batch, batch_idx)

    stored, computed = TABLE[mode]
    module, trace = Looks(OPTIMIZERS["adamw-fused"]), Trace()
    cuda_fit(module, plugins=[plan_for(mode)], callbacks=[trace])
    assert {p.dtype for p in module.parameters()} == {stored}
    assert module.met[0] == computed
    if mode.endswith("mixed"):
        assert module.met[1:] == (FP32, FP32)  # PyTorch's CUDA list: softmax and losses
    assert {gradient.dtype for gradient in trace.seen[-1].values()} == {stored}
    assert {state.dtype for state in trace.states[-1] if state.dim()} == {stored}


@pytest.mark.parametrize("loop", [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.5}], ids=str)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum"])
@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "16-mixed"])
def test_without_a_skip_it_is_stock_lightning_bit_for_bit(mode: str, optimizer: str, loop: dict[str, Any]) -> None:
    stock, ours, there, here = Regression(OPTIMIZERS[optimizer]), Regression(OPTIMIZERS[optimizer]), Trace(), Trace()
    cuda_fit(stock, callbacks=[there], **stock_for(mode, DEVICE), **loop)
    plan = plan_for(mode)
    cuda_fit(ours, callbacks=[here], plugins=[plan], **loop)
    assert plan.skipped_steps == 0
    assert stock.losses == ours.losses
    assert all(same_weights(a, b) for a, b in zip(there.weights, here.weights, strict=True))


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@every_mode
def test_nothing_changes_on_a_skipped_step(mode: str, optimizer: str, at: int) -> None:
    trace, plan = Trace(), plan_for(mode)
    module = Regression(OPTIMIZERS[optimizer], overflow_at=(at,))
    cuda_fit(module, plugins=[plan], callbacks=[trace], gradient_clip_val=0.5)
    assert trace.skipped == [step == at for step in range(8)]
    assert same_weights(trace.weights[at - 1] if at else trace.start, trace.weights[at])
    if at:
        assert equal_states(trace.states[at - 1], trace.states[at])
    assert all(torch.isfinite(weight).all() for weight in trace.weights[-1].values())
    if mode in SCALED:
        assert trace.scales == [256.0 if step < at else 128.0 for step in range(8)]
    assert (plan.applied_steps, plan.skipped_steps) == (7, 1)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "16-mixed"])
def test_clipping_a_fused_optimizer_leaves_clipped_gradients_behind(mode: str, fused: bool) -> None:
    class Clipped(Regression):
        def optimizer_step(self, *arguments: Any, **options: Any) -> None:
            super().optimizer_step(*arguments, **options)
            self.norms.append(torch.stack([p.grad.norm() for p in self.parameters()]).norm().item())

    module = Clipped(OPTIMIZERS["adamw-fused" if fused else "adamw"])
    module.norms = []
    cuda_fit(module, plugins=[plan_for(mode)], gradient_clip_val=0.5)
    assert module.norms == [pytest.approx(0.5, rel=1e-3)] * 8


@pytest.mark.parametrize("mode", ["bf16-mixed", "16-mixed"])
def test_a_resumed_run_is_the_uninterrupted_one(mode: str, tmp_path: Path) -> None:
    def run(**options: Any) -> tuple[Regression, Trace, Any]:
        module, trace, plan = Regression(OPTIMIZERS["adamw-fused"], overflow_at=(1, 5)), Trace(), plan_for(mode)
        callbacks = [trace, *options.pop("also", [])]
        cuda_fit(module, plugins=[plan], callbacks=callbacks, data=ResumableBatches(), **options)
        return module, trace, plan

    whole, trace, _ = run(also=[SaveAt(tmp_path, 3)])
    resumed, rest, plan = run(ckpt_path=tmp_path / "3.ckpt")
    assert torch.load(tmp_path / "3.ckpt", weights_only=True)["MixedPrecisionPlan"]["steps"]["skipped_steps"] == 1
    assert resumed.losses == whole.losses[3:]
    assert rest.scales == trace.scales[3:]
    assert (plan.applied_steps, plan.skipped_steps) == (6, 2)


FUSED: dict[str, Any] = {
    "adamw": partial(AdamW, lr=1e-2, fused=True),
    "sgd-momentum": partial(SGD, lr=1e-2, momentum=0.9, fused=True),
}
CLIPS: dict[str, dict[str, Any]] = {
    "no clip": {},
    "norm": {"gradient_clip_val": 0.5},
    "value": {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
}


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", FUSED)
@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"])
def test_a_warm_step_never_waits_skipped_or_not(mode: str, optimizer: str, clip: str) -> None:
    plan = plan_for(mode)
    module = Unread(FUSED[optimizer], overflow_at=(4,))
    cuda_fit(module, callbacks=[NothingWaits()], plugins=[plan], **CLIPS[clip])
    assert (plan.applied_steps, plan.skipped_steps) == (7, 1)


def test_the_judge_sees_the_reads_that_are_there() -> None:
    """The plan asks for the flag before a plain optimizer."""
    with pytest.raises(RuntimeError, match="synchroniz"):
        cuda_fit(Unread(partial(SGD, lr=1e-2)), callbacks=[NothingWaits()], plugins=[plan_for("16-mixed")])
