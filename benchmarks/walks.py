"""Which files of the package run on four ways through it: ``python -m benchmarks.walks``.

From YAML to a scale, from a pin to a forward, one FSDP2 step and one ZeRO step, as docs/architecture.md has them.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_mp
from benchmarks.harness import fit, quietly
from lightning_mp import MixedPrecisionPlan, make_strategy

PACKAGE = Path(lightning_mp.__file__).parent
#: the step that is followed: nothing is made for the first time in it
STEP = 2


class Files:
    """Notes the files of the package whose functions are called while it is on, in any thread."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def __enter__(self) -> Files:
        sys.setprofile(self._note)
        threading.setprofile(self._note)  # autograd's threads
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            self.found.add(str(path.relative_to(PACKAGE)))


class Net(LightningModule):
    """A norm, which is pinned, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, batch: Tensor) -> Tensor:
        """The one after the other."""
        return self.linear(self.norm(batch))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Mean square of the output."""
        return self(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with torch's defaults."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class OneStep(Callback):
    """Follows one training batch."""

    def __init__(self) -> None:
        self.files = Files()

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """Begin."""
        if batch_idx == STEP:
            self.files.__enter__()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End."""
        if batch_idx == STEP:
            self.files.__exit__()


def yaml_to_scale() -> set[str]:
    """A YAML file's ``init_scale`` becomes the scale."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.yaml")
        path.write_text("precision: 16-mixed\nloss_scaling:\n  init_scale: 1024\n")
        with Files() as files:
            assert MixedPrecisionPlan.from_config(path).scaler.get_scale() == 1024
    return files.found


def pin_to_forward() -> set[str]:
    """A pin is matched, applied and run."""
    net, plan = Net(), MixedPrecisionPlan("bf16-mixed", pins={"norm": "fp32"})
    with Files() as files:
        plan.convert_module(net)
        with plan.forward_context():
            net(torch.randn(2, 16))
    return files.found


def step_of(strategy: str) -> Callable[[], set[str]]:
    """One step in fp16 with a pin, clipped by norm."""

    def run() -> set[str]:
        plan, follow = MixedPrecisionPlan("16-mixed", pins={"norm": "fp32"}), OneStep()
        with tempfile.TemporaryDirectory() as folder:
            data = DataLoader(torch.randn(8, 16), batch_size=2)  # pyright: ignore[reportArgumentType]
            host = {"accelerator": "cpu", "strategy": make_strategy(strategy, plan), "default_root_dir": folder}
            fit(Net(), data, plan, STEP + 1, callbacks=[follow], gradient_clip_val=1.0, **host)
        return follow.files.found

    return run


WALKS: dict[str, Callable[[], set[str]]] = {
    "YAML to scale": yaml_to_scale,
    "pin to forward": pin_to_forward,
    "one FSDP2 step": step_of("fsdp2"),
    "one ZeRO step": step_of("deepspeed_zero2"),
}


def main() -> None:
    """Print each walk's files."""
    quietly()
    for name, walk in WALKS.items():
        files = sorted(walk())
        print(f"{name}: {len(files)} files: {', '.join(files)}")


if __name__ == "__main__":
    main()
