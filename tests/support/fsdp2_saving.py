"""Runs that are saved and gone on with under FSDP2, by as many processes or fewer, as shards or as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from lightning_mp import LossScaling
from support.fsdp2 import PINS, Blocks, Net, ddp, fsdp2, full, trained
from support.saving import ResumableBatches, SaveAt

AT = 4


class Saved(Blocks):
    """The same data for every process, and one frozen layer."""

    def __init__(self, optimizer: str, bad: tuple[int, ...] = ()) -> None:
        super().__init__(optimizer, bad)
        self.net[0].up.requires_grad_(False)

    def factor(self) -> int:
        return 1


def _options() -> dict[str, Any]:
    scaling = LossScaling(init_scale=32.0, hysteresis=2, growth_interval=3)
    return {"pins": PINS, "loss_scaling": scaling, "data": ResumableBatches(), "gradient_clip_val": 0.5}


def _host(name: str, **options: Any) -> dict[str, Any]:
    return ddp() if name == "ddp" else fsdp2(**{"wrap": Net, **options})


def _moments(module: nn.Module, runner: Any) -> dict[str, Tensor]:
    state = get_optimizer_state_dict(module, runner.optimizers[0])["state"]
    return {f"{name}.{key}": full(value) for name, values in state.items() for key, value in values.items()}


def save(folder: str, host: str, optimizer: str, whole: bool) -> dict[str, Any]:
    """A run to the end that is saved in the middle."""
    module = Saved(optimizer, (1,))
    save_at = SaveAt(Path(folder), AT)
    kept: dict[str, Any] = {}
    module.on_train_end = lambda: kept.update(_moments(module, module.trainer))
    strategy = {"save_distributed_checkpoint": not whole}
    result = trained("16-mixed", _host(host, **strategy), module, callbacks=[save_at], **_options())
    return {**result, "moments": kept, "folder": (Path(folder) / f"{AT}.ckpt").is_dir()}


def resume(folder: str, host: str, optimizer: str) -> dict[str, Any]:
    """A run from the middle to the end, by a module with other weights."""
    module = Saved(optimizer)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    kept: dict[str, Any] = {}
    module.on_train_end = lambda: kept.update(_moments(module, module.trainer))
    result = trained("16-mixed", _host(host), module, ckpt_path=Path(folder) / f"{AT}.ckpt", **_options())
    return {**result, "moments": kept}
