"""What every benchmark shares: models, one way to train, and medians of two sides that take turns."""

import logging
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_mp import LossScaling, MixedPrecisionPlan

VOCABULARY, CONTEXT = 2048, 128
WARM_UP = 5
MODES = ("32-true", "bf16-mixed", "16-mixed")
#: a scale at which no step of these models overflows: a skipped step costs less, and changes no weight
SCALE = 2.0**8


class LanguageModel(LightningModule):
    """GPT-2 from a config, next-token loss, AdamW with torch's defaults: stock Lightning cannot clip a fused one."""

    def __init__(self) -> None:
        super().__init__()
        size = {"n_embd": 192, "n_layer": 4, "n_head": 6}
        tokens = {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "bos_token_id": 0, "eos_token_id": 0}
        self.model = GPT2LMHeadModel(GPT2Config(**size, **tokens, use_cache=False))

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Tiny(LanguageModel):
    """A net so small that a step is Lightning's loop and little else."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).float().pow(2).mean()


def tokens() -> DataLoader[Any]:
    return _batches(8, torch.randint(VOCABULARY, (512, CONTEXT), generator=torch.Generator().manual_seed(0)))


def vectors() -> DataLoader[Any]:
    return _batches(16, torch.randn(8192, 32, generator=torch.Generator().manual_seed(0)))


def _batches(size: int, rows: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(rows), batch_size=size)


def fit(module: LightningModule, data: Any, plugin: Any, steps: int, **more: Any) -> Trainer:
    """``steps`` steps under ``plugin`` (``None``: the Trainer's own), with nothing written or shown."""
    shown = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger")
    plugins = None if plugin is None else [plugin]
    given = {"accelerator": "auto", "devices": 1, "max_steps": steps, "plugins": plugins, **dict.fromkeys(shown, False)}
    trainer = Trainer(**{**given, **more})
    trainer.fit(module, data)
    return trainer


class StepTimes(Callback):
    """Wall-clock seconds from the end of one batch to the end of the next, the loop around the step included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: float | None = None

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._last is not None and trainer.global_step > WARM_UP:
            self.seconds.append(now - self._last)
        self._last = now


def interleaved(sides: Mapping[str, Callable[[], list[float]]], rounds: int) -> dict[str, float]:
    """Each side's median, the sides taking turns from the same seed, with the order swapped every round."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in sorted(sides, reverse=bool(number % 2)):
            torch.manual_seed(0)
            seconds[name] += sides[name]()
    return {name: statistics.median(values) for name, values in seconds.items()}


def stock(mode: str) -> Precision | None:
    """Lightning's own plugin for ``mode``; it has no fp16 on the CPU by name, but the plugin itself works there."""
    if mode == "32-true":
        return None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scaler = torch.amp.GradScaler(device, init_scale=SCALE) if mode == "16-mixed" else None
    return MixedPrecision(mode, device, scaler)  # pyright: ignore[reportArgumentType]


def plan(mode: str, **fields: Any) -> MixedPrecisionPlan:
    scaling = LossScaling.torch(init_scale=SCALE) if mode == "16-mixed" else None
    return MixedPrecisionPlan(mode, loss_scaling=scaling, **fields)  # pyright: ignore[reportArgumentType]


def quietly() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def device_name() -> str:
    """The GPU, or the CPU and how many threads torch uses on it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = f"{platform.processor() or platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
    return f"{name}, {torch.get_num_threads()} threads"
