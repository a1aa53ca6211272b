"""Runs that are saved and gone on with under FSDP2, by as many processes or fewer, as shards or as one file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from lightning_mp import LossScaling
from support.fsdp2_models import Blocks, Net
from support.saving import ResumableBatches, SaveAt
from support.sharded import PINS, ddp, fsdp2, full, trained

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
    return ddp(find_unused_parameters=True) if name == "ddp" else fsdp2(**{"wrap": Net, **options})


def _moments(module: nn.Module, runner: Any) -> dict[str, Tensor]:
    state = get_optimizer_state_dict(module, runner.optimizers[0])["state"]
    return {f"{name}.{key}": full(value) for name, values in state.items() for key, value in values.items()}


@dataclass(frozen=True)
class Save:
    """A run to the end that is saved in the middle, as shards or whole."""

    folder: Path
    optimizer: str
    whole: bool = False

    def run(self) -> dict[str, Any]:
        module, kept = Saved(self.optimizer, (1,)), dict[str, Any]()
        module.on_train_end = lambda: kept.update(_moments(module, module.trainer))
        host = _host("fsdp2", save_distributed_checkpoint=not self.whole)
        result = trained("16-mixed", host, module, callbacks=[SaveAt(self.folder, AT)], **_options())
        return {**result, "moments": kept, "folder": (self.folder / f"{AT}.ckpt").is_dir()}


@dataclass(frozen=True)
class Resume:
    """A run from the middle to the end, by a module with other weights."""

    folder: Path
    host: str
    optimizer: str

    def run(self) -> dict[str, Any]:
        module, kept = Saved(self.optimizer), dict[str, Any]()
        for parameter in module.parameters():
            parameter.data.add_(1.0)
        module.on_train_end = lambda: kept.update(_moments(module, module.trainer))
        path = self.folder / f"{AT}.ckpt"
        result = trained("16-mixed", _host(self.host), module, ckpt_path=path, **_options())
        return {**result, "moments": kept}
