"""What the doctor's tests ask of it, and the models they ask about."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_mp.policy.hardware import Device
from lightning_mp.preflight.doctor import doctor
from lightning_mp.record.findings import Finding

A100 = Device("cuda", "NVIDIA A100", (8, 0))
V100 = Device("cuda", "Tesla V100", (7, 0), bf16="emulated")
OLD = Device("cuda", "Tesla P100", (6, 0), bf16="none")
#: what the tests run on, whatever this machine has
CPU = Device("cpu", "CPU")


def found(model: nn.Module, plan: Any = None, *rest: Any, **options: Any) -> dict[str, Finding]:
    """The findings by name; no name comes twice in these tests."""
    findings = doctor(model, plan, *rest, **{"device": CPU, **options})
    assert len({finding.name for finding in findings}) == len(findings), findings
    return {finding.name: finding for finding in findings}


class Wrapped(LightningModule):
    def __init__(self, model: nn.Module, optimizers: Any = None) -> None:
        super().__init__()
        self.model = model
        self.make = optimizers

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (self.model(x).float() - y.float()).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return self.make([p for p in self.parameters() if p.requires_grad])


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def resnet() -> nn.Sequential:
    stem = (nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), Residual(32), Residual(32))
    return nn.Sequential(*stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.lstm = nn.LSTM(32, 64, num_layers=2, dropout=0.1)
        self.head = nn.Linear(64, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(ids))[0])


def bert(labels: bool = False) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    config = BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    return (BertForSequenceClassification if labels else BertForMaskedLM)(config).train()
