"""Predicted memory beside the allocator's, written into docs/reference/planner.md.

``python -m benchmarks.memory [sharded]``: all cells of one device, an hour on a busy machine, or those of a rank of two
on gloo under each strategy, with what it holds between steps; the slow tests hold them.
"""

import gc
import itertools
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.planner_pages import DOCS, table, write
from lightning_mp import FP8, Checkpointing, MixedPrecisionPlan, make_strategy, trainer_kwargs
from lightning_mp.comparison.compare import quiet
from lightning_mp.compat.lightning import Callback, LightningModule, Trainer
from lightning_mp.numerics.peak_memory import PeakMemory
from lightning_mp.planner import MemoryPrediction, predict_memory
from lightning_mp.planner.predict import ALONE, STEPS

#: the lines of the page before the two tables
ALONE_BELOW = "On one device, against the allocator on a CPU:"
SHARDED_BELOW = "A rank of two on gloo, Llama. `held` are parameters, gradients and optimizer state between steps:"
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
        recomputed = None
        if self.checkpointing != "none":
            recomputed = Checkpointing(modules=_BLOCKS[self.model], mode=self.checkpointing)  # pyright: ignore[reportArgumentType]
        pins = {_NORMS[self.model]: "fp32"} if self.precision == "16-mixed" else None
        fp8 = FP8(small="convert") if self.precision == "fp8-mixed" else None
        return MixedPrecisionPlan(self.precision, pins=pins, fp8=fp8, checkpointing=recomputed)

    def batch(self) -> Any:
        if self.model == "conv":
            return torch.randn(16, 3, 32, 32), torch.randint(16, (16,))
        return torch.randint(_VOCAB, (1, 64) if self.precision == "fp8-mixed" else (self.rows, 128))

    def module(self) -> LightningModule:
        torch.manual_seed(0)
        width = 64 if self.precision == "fp8-mixed" else 128
        net = ConvNet() if self.model == "conv" else _language_model(self.model, width, self.kv_heads)
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
        inputs = (3, *[width] * 4)
        layers = ((nn.Conv2d(one, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()) for one in inputs)
        self.blocks = nn.Sequential(*(nn.Sequential(*each) for each in layers))
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean((2, 3)))


def _language_model(name: str, width: int, kv_heads: int) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    if name == "gpt2":
        sizes = {"n_embd": width, "n_layer": 3, "n_head": 2, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0}
    else:
        sizes = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": kv_heads}
        sizes |= {"hidden_size": width, "intermediate_size": 5 * width // 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, vocab_size=_VOCAB, **sizes))


def cells() -> Iterator[Cell]:
    """All of one device. FP8 is refused on GPT-2, whose layers are no ``nn.Linear``."""
    every = itertools.starmap(Cell, itertools.product(MODELS, PRECISIONS, CHECKPOINTING, OPTIMIZERS))
    return (cell for cell in every if (cell.model, cell.precision) != ("gpt2", "fp8-mixed"))


def measured(cell: Cell) -> int:
    """The CPU allocator's peak over making the model and two steps, in bytes.

    Without oneDNN, but for convolutions: its scratch inside a matrix product is no tensor's, and differs by CPU.
    """
    gc.collect()
    with quiet():
        warnings.filterwarnings("ignore", "TF32 acceleration")  # it speaks of Intel's GPUs
        with torch.backends.mkldnn.flags(enabled=cell.model == "conv"), PeakMemory() as peak:
            arguments = trainer_kwargs(cell.plan(), devices=1, **_HERE, **ALONE)
            Trainer(**arguments).fit(cell.module(), itertools.repeat(cell.batch()))
    return peak.bytes


def predicted(cell: Cell, strategy: str | None = None) -> MemoryPrediction:
    plan = cell.plan()
    given: dict[str, Any] = {"trainer_args": {"accelerator": "cpu"}}
    if strategy is not None:
        word, options = STRATEGIES[strategy]
        given |= {"strategy": make_strategy(word, plan, **options), "devices": 2}
    return predict_memory(cell.module(), cell.batch(), plan, **given)


HELD = ("parameters", "gradients", "optimizer_state")
#: the strategy's name for ``make_strategy``, and what it is told
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {f"`{one}`": (one, {}) for one in ("ddp", "fsdp2", "hsdp", "fsdp1")}
STRATEGIES["`fsdp2`, `tensor_parallel=2`"] = ("fsdp2", {"tensor_parallel": 2})
#: rows enough that activations are most of it
SHARDED_CELLS = tuple(
    Cell("llama", *which, rows=8, kv_heads=2)
    for which in (
        ("32-true", "none", "SGD"),
        ("bf16-mixed", "none", "AdamW"),
        ("16-mixed", "full", "AdamW"),
        ("bf16-true", "selective", "AdamW"),
    )
)


class _Holds(Callback):
    """Counts storages after the second step, each once."""

    bytes: dict[str, int]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == STEPS:
            parameters, seen = list(pl_module.parameters()), set[int]()
            states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
            kinds = (parameters, [parameter.grad for parameter in parameters], states)
            self.bytes = {name: _bytes(kind, seen) for name, kind in zip(HELD, kinds, strict=True)}


def _bytes(tensors: Iterable[Any], seen: set[int]) -> int:
    here = (one.to_local() if isinstance(one, DTensor) else one for one in tensors if isinstance(one, Tensor))
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in here}
    new = {place: size for place, size in storages.items() if place not in seen}
    seen |= new.keys()
    return sum(new.values())


def of_rank(cell: Cell, name: str) -> tuple[int, dict[str, int]]:
    """The allocator's peak on this rank, and what it holds after two steps, in bytes.

    It is run some times, more often with tensor parallelism, which sends activations, and the peak is the second least:
    gloo's threads let go of what they sent at no fixed moment, which adds in the run itself, and from the run before it
    is counted as a fall.
    """
    peaks, holds, (word, options) = [], _Holds(), STRATEGIES[name]
    for _ in range(6 if "tensor_parallel" in name else 3):
        gc.collect()
        with quiet(), PeakMemory() as peak:
            plan = cell.plan()
            given = {**_HERE, **ALONE, "callbacks": [holds], "devices": 2}
            trainer = Trainer(**trainer_kwargs(plan, strategy=make_strategy(word, plan, **options), **given))
            trainer.fit(cell.module(), itertools.repeat(cell.batch()))
            del trainer
        peaks.append(peak.bytes)
    return sorted(peaks)[1], holds.bytes


def summed_up(found: Iterable[tuple[str, int, Sequence[float]]]) -> list[list[object]]:
    """A row for each name: how many cells it has, their largest peak in MiB, and the worst of each error."""
    groups: dict[str, list[tuple[int, Sequence[float]]]] = {}
    for name, peak, errors in found:
        print(name, f"{peak / 2**20:.2f} MiB", *(f"{error:+.2%}" for error in errors), flush=True)
        groups.setdefault(name, []).append((peak, errors))
    rows: list[list[object]] = []
    for name, of in groups.items():
        worst = (max(column, key=abs) for column in zip(*(errors for _, errors in of), strict=True))
        largest = max(peak for peak, _ in of) / 2**20
        rows.append([name, len(of), f"{largest:.1f}", *(f"{error:+.1%}" for error in worst)])
    return rows


def _alone() -> Iterator[tuple[str, int, Sequence[float]]]:
    for cell in cells():
        said, true = predicted(cell).peak_bytes, measured(cell)
        yield cell.model, true, [said / true - 1]


def _sharded() -> Iterator[tuple[str, int, Sequence[float]]]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from support.ranks import Ranks

    with Ranks() as ranks:
        for name, cell in itertools.product(STRATEGIES, SHARDED_CELLS):
            said, answers = predicted(cell, name), ranks.call(of_rank, cell, name)
            true, held = min(answers, key=lambda answer: answer[0])
            holds = sum(said.held[part] for part in HELD) / sum(held.values())
            yield name, true, [said.peak_bytes / true - 1, holds - 1]


if __name__ == "__main__":
    page = DOCS / "reference" / "planner.md"
    if "sharded" in sys.argv[1:]:
        write(page, SHARDED_BELOW, table(["strategy", *FIGURES, "worst of what is held"], summed_up(_sharded())))
    else:
        write(page, ALONE_BELOW, table(["model", *FIGURES], summed_up(_alone())))
