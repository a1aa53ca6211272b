"""PrecisionAudit raises no false alarm: models as people have them, every precision, pins and checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp.compat.torch import cpu_has_lstm
from lightning_mp.precision_audit.callback import PrecisionAudit
from support.language import Language, gpt2, llama, tokens
from support.oracles import MODES, plan_for, stock_for
from support.running import fit

#: model, norms to pin, blocks to recompute
LANGUAGE: dict[str, tuple[Callable[..., Any], dict[str, str], str]] = {
    "llama": (llama, {"*norm*": "fp32", "lm_head": "fp32"}, "LlamaDecoderLayer"),
    "gpt2, tied": (gpt2, {"LayerNorm": "fp32", "lm_head": "fp32"}, "GPT2Block"),
}


def _own_parameters(module: LightningModule) -> set[str]:
    return {name for name, part in module.named_modules() if next(part.parameters(recurse=False), None) is not None}


def _audited(module: LightningModule, folder: Path, data: Any = None, **precision: Any) -> PrecisionAudit:
    callback = PrecisionAudit(2, "raise", folder)
    fit(module, data=data, callbacks=[callback], max_steps=2, **precision)
    assert {row.module for row in callback.rows} == _own_parameters(module)
    return callback


@pytest.mark.parametrize(
    ("recomputed", "pinned", "mode"),
    [*(("full", True, mode) for mode in MODES), ("", False, "bf16-mixed"), ("selective", True, "16-mixed")],
)
@pytest.mark.parametrize("name", LANGUAGE)
def test_language_models(name: str, recomputed: str, pinned: bool, mode: str, tmp_path: Path) -> None:
    make, pins, blocks = LANGUAGE[name]
    checkpointing = {"modules": blocks, "mode": recomputed} if recomputed else None
    plan = plan_for(mode, pins=pins if pinned else None, checkpointing=checkpointing)
    callback = _audited(Language(make()), tmp_path, tokens(), plugins=[plan])
    linear = next(row for row in callback.rows if row.module.endswith(("q_proj", "c_attn")))
    assert linear.compute == linear.declared == plan.policy.compute_dtype
    head = callback.rows[-1]
    assert (head.module, head.compute) == ("model.lm_head", "fp32" if pinned else plan.policy.compute_dtype)


class Recurrent(nn.Module):
    """Token embeddings, a recurrent layer, a head."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.embed, self.cells, self.head = nn.Embedding(10, 8), kind(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.embed(x))[0])


class PartlyUsed(nn.Module):
    """A frozen layer, one that is never called, and a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.idle, self.last = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(x) * self.scale)


def _convolutions() -> nn.Module:
    one = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU(), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4))
    return nn.Sequential(one, nn.InstanceNorm2d(4, affine=True), nn.ConvTranspose2d(4, 2, 2))


def _parametrized() -> nn.Module:
    weight, spectral = nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm
    return nn.Sequential(weight(nn.Linear(8, 8)), nn.RMSNorm(8), spectral(nn.Linear(8, 2)))


HALVES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
#: model, one row of its data; whole numbers below 10 where it is one of tokens
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "convolutions": (_convolutions, (3, 8, 8), False),
    "lstm": (lambda: Recurrent(nn.LSTM), (5,), True),
    "gru": (lambda: Recurrent(nn.GRU), (5,), True),
    "bag": (lambda: nn.Sequential(nn.EmbeddingBag(10, 8), nn.Linear(8, 2)), (5,), True),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), (5, 8), False),
    "parametrized": (_parametrized, (8,), False),
    "partly used": (PartlyUsed, (8,), False),
    "bare norm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, elementwise_affine=False)), (8,), False),
}


class Vanishing(LightningModule):
    """Trains ``net`` to give nothing."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).float().pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3, eps=1e-4)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # torch's, of its RMSNorm
@pytest.mark.parametrize(("how", "mode"), [("plan", "bf16-mixed"), ("plan", "16-true"), ("stock", "16-mixed")])
@pytest.mark.parametrize("name", NETS)
def test_nets_of_every_kind(name: str, how: str, mode: str, tmp_path: Path) -> None:
    if name == "lstm" and mode.endswith("mixed") and not cpu_has_lstm(HALVES[mode]):
        pytest.skip(f"oneDNN has no LSTM under autocast on this CPU for {mode}")
    make, shape, whole = NETS[name]
    rows = torch.randint(0, 10, (4, *shape)) if whole else torch.randn(4, *shape)
    stock = {"precision": "16-true"} if mode == "16-true" else stock_for(mode)
    precision = {"plugins": [plan_for(mode)]} if how == "plan" else stock
    callback = _audited(Vanishing(make()), tmp_path, DataLoader(TensorDataset(rows), batch_size=2), **precision)
    idle = [row for row in callback.rows if row.module.endswith("idle")]
    assert all((row.input, row.compute, row.ok) == (None, None, True) for row in idle)
