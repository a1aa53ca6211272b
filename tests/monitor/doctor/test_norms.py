"""Norms and losses in half precision, and epsilons that are 0 in fp16; every claim is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp import MixedPrecisionPlan
from support import hf
from support.doctor import A100, CPU, bert, found, net, resnet

MODES = ("bf16-mixed", "16-mixed")
TRUE = ("bf16-true", "16-true")


class OwnNorm(nn.Module):
    """An RMS norm of someone's own; how it squares decides what it sums over."""

    def __init__(self, width: int = 16, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight


class PowNorm(OwnNorm):
    """``pow`` is on CUDA's autocast list, and not on the CPU's."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class CastingNorm(OwnNorm):
    """As in transformers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class ChannelNorm(OwnNorm):
    """Over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        return (x - mean) * self.weight[:, None, None]


def _with(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), norm)


def _unwarned(model: nn.Module, plan: Any, **options: Any) -> dict[str, Any]:
    """The findings but for what every true mode is told."""
    findings: dict[str, Any] = found(model, plan, **options)
    findings.pop("no_fp32_masters", None)
    return findings


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("mode", TRUE)
@pytest.mark.parametrize(
    ("build", "kinds"),
    [(hf.gpt2, "5 norms (LayerNorm)"), (resnet, "5 norms (BatchNorm2d)"), (bert, "6 norms (LayerNorm)")],
)
def test_the_true_modes_run_norms_in_half(build: Callable[[], nn.Module], kinds: str, mode: str, stock: bool) -> None:
    finding = found(build(), mode if stock else MixedPrecisionPlan(mode))["norm_in_half"]
    assert finding.severity == "warning"
    assert kinds in finding.what
    assert "'fp32'" in finding.fix


@pytest.mark.parametrize("mode", TRUE)
def test_a_pin_mends_it(mode: str) -> None:
    assert _unwarned(hf.gpt2(), {"precision": mode, "pins": {"LayerNorm": "fp32"}}) == {}


def test_a_pin_can_also_bring_a_norm_into_half() -> None:
    finding = found(hf.gpt2(), {"precision": "16-mixed", "pins": {"h.0": "fp16"}})["norm_in_half"]
    assert "2 norms" in finding.what
    assert "a pin says so" in finding.why


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("norm", "device", "half"),
    [
        (OwnNorm, CPU, True),
        (OwnNorm, A100, True),
        (PowNorm, CPU, True),
        (PowNorm, A100, False),
        (CastingNorm, CPU, False),
        (CastingNorm, A100, False),
        (ChannelNorm, A100, True),
    ],
)
def test_someones_own_norm_is_judged_by_what_it_does_under_autocast(
    norm: type[OwnNorm], device: Any, half: bool, mode: str
) -> None:
    findings = found(_with(norm()), mode, device=device)
    assert set(findings) == ({"norm_in_half"} if half else set())
    if half:
        assert findings["norm_in_half"].where == "1"
        assert f"DtypePinning({{'{norm.__name__}': 'fp32'}})" in findings["norm_in_half"].fix


def test_hooks_are_the_users_and_are_not_called() -> None:
    calls: list[str] = []
    model = _with(OwnNorm())
    model[1].register_forward_hook(lambda *_: calls.append("forward"))
    assert "norm_in_half" in found(model, "bf16-mixed")
    assert calls == []


# ------------------------------------------------------------------ losses


def _with_loss(loss: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({"net": net(), "loss": loss})


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss()])
def test_a_loss_module_under_a_true_mode_runs_in_half(loss: nn.Module) -> None:
    finding = found(_with_loss(loss), "bf16-true")["norm_in_half"]
    assert finding.where == "loss"
    assert "1 loss module" in finding.what
    pinned = {"precision": "bf16-true", "pins": {type(loss).__name__: "fp32"}}
    assert _unwarned(_with_loss(loss), pinned) == {}
    assert found(_with_loss(loss), "bf16-mixed") == {}


# ------------------------------------------------------------------ eps


@pytest.mark.parametrize(
    ("eps", "vanishes"), [(1e-12, True), (1e-8, True), (1e-7, False), (1e-6, False), (1e-5, False)]
)
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_norms_eps_that_is_0_in_fp16(kind: Any, eps: float, vanishes: bool) -> None:
    model = _with(kind(16, eps=eps))
    assert ("eps_underflows" in found(model, "16-true")) == vanishes
    assert "eps_underflows" not in found(model, "bf16-true")
    assert "eps_underflows" not in found(model, "16-mixed")
    assert "eps_underflows" not in found(model, {"precision": "16-true", "pins": {kind.__name__: "fp32"}})


def test_the_eps_of_someones_own_norm_counts_where_it_runs_in_fp16() -> None:
    assert "eps_underflows" in found(_with(OwnNorm(eps=1e-8)), "16-mixed")
    assert "eps_underflows" not in found(_with(OwnNorm(eps=1e-8)), "bf16-mixed")
    assert "eps_underflows" not in found(_with(CastingNorm(eps=1e-8)), "16-mixed")
