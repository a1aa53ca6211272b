"""Predicted memory beside the allocator's, written into docs/reference/planner.md.

``python -m benchmarks.memory``: all cells of one device, an hour on a busy machine; the slow tests hold them.
"""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.planner_pages import DOCS, table
from lightning_mp import FP8, Checkpointing, MixedPrecisionPlan, trainer_kwargs
from lightning_mp.comparison.run import quiet
from lightning_mp.compat.lightning import LightningModule, Trainer
from lightning_mp.numerics.peak_memory import PeakMemory
from lightning_mp.planner import MemoryPrediction, predict_memory
from lightning_mp.tracing.run import ALONE, Again

MARKS = ("<!-- written by benchmarks/memory.py -->", "<!-- as far as here, by benchmarks/memory.py -->")
FIGURES = ("cells", "largest peak, MiB", "worst prediction")
MODELS = ("gpt2", "llama", "conv")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "fp8-mixed")
CHECKPOINTING = ("none", "full", "selective")
OPTIMIZERS = ("AdamW", "SGD")
_BLOCKS = {"llama": "*.layers.*", "gpt2": "*.h.*", "conv": "blocks.*"}
_NORMS = {"llama": "*norm*", "gpt2": "ln_*", "conv": "BatchNorm2d"}
_VOCAB = 512
_HERE = {"accelerator": "cpu", "logger": False}


@dataclass(frozen=True)
class Cell:
    """One line of the table. FP8 products are slow on a CPU, so that those models are small."""

    model: str
    precision: str
    checkpointing: str
    optimizer: str
    rows: int = 4
    kv_heads: int = 1

    def plan(self) -> MixedPrecisionPlan:
        """The plan; fp16 with pinned norms."""
        recomputed = None
        if self.checkpointing != "none":
            recomputed = Checkpointing(modules=_BLOCKS[self.model], mode=self.checkpointing)  # pyright: ignore[reportArgumentType]
        pins = {_NORMS[self.model]: "fp32"} if self.precision == "16-mixed" else None
        fp8 = FP8(small="convert") if self.precision == "fp8-mixed" else None
        return MixedPrecisionPlan(self.precision, pins=pins, fp8=fp8, checkpointing=recomputed)

    def batch(self) -> Any:
        """Images and classes, or token ids."""
        if self.model == "conv":
            return torch.randn(16, 3, 32, 32), torch.randint(16, (16,))
        return torch.randint(_VOCAB, (1, 64) if self.precision == "fp8-mixed" else (self.rows, 128))

    def module(self) -> LightningModule:
        """The model with its optimizer."""
        torch.manual_seed(0)
        net = (
            ConvNet()
            if self.model == "conv"
            else _language_model(self.model, 64 if self.precision == "fp8-mixed" else 128, self.kv_heads)
        )
        return Trained(net.train(), self.optimizer)


class Trained(LightningModule):
    """A network that returns its loss, and an optimizer by name."""

    def __init__(self, net: nn.Module, optimizer: str) -> None:
        super().__init__()
        self.net, self._optimizer = net, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, Tensor):
            loss = self.net(input_ids=batch, labels=batch, use_cache=False).loss
        else:
            loss = nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        if self._optimizer == "AdamW":
            return torch.optim.AdamW(self.parameters(), lr=1e-3)
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


class ConvNet(nn.Module):
    """Five convolutions with batch norm, narrow, since oneDNN's scratch inside a wide one is no tensor's."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = [3, *[width] * 5]
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(one, other, 3, padding=1), nn.BatchNorm2d(other), nn.ReLU())
                for one, other in itertools.pairwise(sizes)
            )
        )
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean((2, 3)))


def _language_model(name: str, width: int, kv_heads: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if name == "gpt2":
        sizes = {"n_embd": width, "n_layer": 3, "n_head": 2, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=_VOCAB, **sizes))
    heads = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": kv_heads}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=_VOCAB, hidden_size=width, intermediate_size=5 * width // 2, **heads)
    )


def cells() -> Iterator[Cell]:
    """All of one device. FP8 is refused on GPT-2, whose layers are no ``nn.Linear``."""
    every = itertools.starmap(Cell, itertools.product(MODELS, PRECISIONS, CHECKPOINTING, OPTIMIZERS))
    return (cell for cell in every if (cell.model, cell.precision) != ("gpt2", "fp8-mixed"))


@contextmanager
def _onednn(*, on: bool) -> Generator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it speaks of Intel's GPUs
        with torch.backends.mkldnn.flags(enabled=on):
            yield


def measured(cell: Cell) -> int:
    """The CPU allocator's peak over making the model and two steps, in bytes.

    Without oneDNN, but for convolutions: its scratch inside a matrix product is no tensor's, and differs by CPU.
    """
    gc.collect()
    with _onednn(on=cell.model == "conv"), quiet(), PeakMemory() as peak:
        arguments = trainer_kwargs(cell.plan(), devices=1, **_HERE, **ALONE)
        Trainer(**arguments).fit(cell.module(), Again(cell.batch()))
    return peak.bytes


def predicted(cell: Cell) -> MemoryPrediction:
    """The same, predicted."""
    return predict_memory(cell.module(), cell.batch(), cell.plan(), trainer_args={"accelerator": "cpu"})


def summed_up(found: Iterable[tuple[tuple[str, ...], int, Sequence[float]]]) -> list[list[object]]:
    """A row for each key: how many cells it has, their largest peak in bytes, and the worst of each error."""
    groups: dict[tuple[str, ...], list[tuple[int, Sequence[float]]]] = {}
    for key, peak, errors in found:
        print(*key, f"{peak / 2**20:.2f} MiB", *(f"{error:+.2%}" for error in errors), flush=True)
        groups.setdefault(key, []).append((peak, errors))
    return [
        [
            *key,
            len(cells),
            f"{max(peak for peak, _ in cells) / 2**20:.1f}",
            *(f"{max(column, key=abs):+.1%}" for column in zip(*(errors for _, errors in cells), strict=True)),
        ]
        for key, cells in groups.items()
    ]


def _found() -> Iterator[tuple[tuple[str, ...], int, Sequence[float]]]:
    for cell in cells():
        said, true = predicted(cell).peak_bytes, measured(cell)
        yield (cell.model,), true, [said / true - 1]


def write(
    head: list[str], found: Iterable[tuple[tuple[str, ...], int, Sequence[float]]], marks: tuple[str, str]
) -> None:
    """Write a table into docs/reference/planner.md, between the two ``marks``."""
    # takes long: what is written of the page meanwhile stays
    page, written = DOCS / "reference" / "planner.md", table(head, summed_up(found))
    before, _, rest = page.read_text(encoding="utf-8").partition(marks[0])
    page.write_text(f"{before}{marks[0]}\n\n{written}\n{marks[1]}{rest.partition(marks[1])[2]}", encoding="utf-8")


if __name__ == "__main__":
    write(["model", *FIGURES], _found(), MARKS)
