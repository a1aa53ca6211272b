"""A few steps of a model that is compiled, beside the same steps of it in eager mode."""

import shutil
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.utils.data import DataLoader

from conformance.cells import is_refusal
from conformance.judge import DIFFERS, FAILED, REFUSED, SAME, Verdict
from conformance.rows import CompiledRow
from conformance.strategies import trainer_arguments
from lightning_mp.compat.lightning import LightningModule
from support.fp8 import VOCABULARY, Language
from support.sharded import full

STEPS, ROWS, LENGTH = 5, 4, 8


class Learner(Language):
    """Records the loss, the gradients in full and how many graphs were compiled, step by step."""

    validation_step = LightningModule.validation_step  # it has none

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.blocks)  # a Sequential would be pinned, around what is compiled
        self.each_gradients: list[dict[str, Tensor]] = []
        self.graphs: list[int] = []

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch[self.global_rank]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch)[:, :-1]
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        named = [(name.replace("_orig_mod.", ""), one.grad) for name, one in self.named_parameters()]
        self.each_gradients.append({name: full(grad) for name, grad in named if grad is not None})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.graphs.append(counters["stats"]["unique_graphs"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _given(module: Learner, row: CompiledRow) -> Any:
    backend = row.backend
    if row.way == "torch.compile(module)":
        return torch.compile(module, backend=backend)
    if row.way == "torch.compile(block)":
        module.blocks = nn.ModuleList([torch.compile(block, backend=backend) for block in module.blocks])  # type: ignore
    for part in {"module.compile()": [module], "block.compile()": module.blocks}.get(row.way, ()):
        part.compile(backend=backend)
    return module


@dataclass
class Ran:
    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    counts: tuple[int, int] = (0, 0)
    #: why graphs were broken
    breaks: list[str] = field(default_factory=list)
    #: graphs that were compiled until the end of each step
    graphs: list[int] = field(default_factory=list)
    word: str = ""
    reason: str = ""


def run_cell(strategy: str, row: CompiledRow) -> tuple[Ran, Ran]:
    return _run(strategy, row, compiled=False), _run(strategy, row, compiled=True)


def _run(strategy: str, row: CompiledRow, *, compiled: bool) -> Ran:
    from support.running import fit

    torch._dynamo.reset()
    inductor.compile_threads = 1  # a pool of compilers would import torch again
    counters.clear()
    module, ran, plan = Learner(), Ran(), row.plan()
    folder = Path(tempfile.mkdtemp())
    options: dict[str, Any] = {"wrap": "Block"} if strategy == "fsdp2" else {}
    compiles = compiled and by_strategy(strategy, row)
    if compiles:
        options["compile"] = True
    try:
        given = _given(module, row) if compiled and not compiles else module
        arguments = trainer_arguments(strategy, plan, **options)
        fit(given, data=_batches(), callbacks=_callbacks(row, folder), **arguments)
        ran.counts = plan.applied_steps, plan.skipped_steps
    except Exception as error:
        refused = is_refusal(error) or "compiled model is incompatible with the current strategy" in str(error)
        ran.word = REFUSED if refused and not module.losses else FAILED
        ran.reason = str(error) if ran.word == REFUSED else traceback.format_exc()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ran.losses, ran.gradients, ran.graphs = module.losses, module.each_gradients, module.graphs
    ran.breaks = [*counters["graph_break"]]
    return ran


def _batches() -> DataLoader[Tensor]:
    """Of every step a batch for each of two ranks: rows that count upwards from a random start."""
    start = torch.randint(VOCABULARY, (STEPS, 2, ROWS, 1), generator=torch.Generator().manual_seed(3))
    return DataLoader((start + torch.arange(LENGTH)) % VOCABULARY, batch_size=None)  # type: ignore[arg-type]


def _callbacks(row: CompiledRow, folder: Path) -> list[Any]:
    from lightning_mp.callbacks import PrecisionAudit, TrainingHealth

    return [TrainingHealth(folder, report=False), PrecisionAudit(run_dir=folder)] if row.watched else []


def judge(strategy: str, row: CompiledRow, cells: Sequence[tuple[Ran, Ran]]) -> Verdict:
    words = {compiled.word or eager.word for eager, compiled in cells}
    if words == {REFUSED}:
        return Verdict(REFUSED, [cells[0][1].reason or cells[0][0].reason])
    if words != {""}:
        return Verdict(FAILED, [f"rank {rank}: {one.reason}" for rank, each in enumerate(cells) for one in each])
    found = [f"rank {rank}: {why}" for rank, each in enumerate(cells) for why in _differences(row, *each)]
    if not _gathers_inside(strategy, row):
        found += [f"rank {rank}: {why}" for rank, (_, one) in enumerate(cells) for why in _graphs(one)]
    return Verdict(DIFFERS if found else SAME, found)


def _gathers_inside(strategy: str, row: CompiledRow) -> bool:
    """Whether what is compiled has shard units in it: their gathers break its graph, as the page of torch.compile says.

    Under a true mode each norm that is pinned to fp32 is one.
    """
    norms = row.pins == "norms" and row.mode in ("bf16-true", "16-true")
    return strategy == "fsdp2" and (norms or row.way == "module.compile()")


def by_strategy(strategy: str, row: CompiledRow) -> bool:
    """Whether the strategy compiles the blocks, which it does by inductor alone."""
    return strategy == "fsdp2" and (row.way, row.backend) == ("block.compile()", "inductor")


def is_refused(strategy: str, row: CompiledRow) -> bool:
    """A module from ``torch.compile`` by Lightning; where a unit within a checkpointed block breaks it, by the plan."""
    checkpointed = by_strategy(strategy, row) and row.checkpointing and _gathers_inside(strategy, row)
    return checkpointed or (strategy == "fsdp2" and row.way == "torch.compile(module)")


def _differences(row: CompiledRow, eager: Ran, compiled: Ran) -> Iterator[str]:
    if eager.counts != compiled.counts:
        yield f"applied and skipped: {compiled.counts}, {eager.counts} in eager mode"
    for step, (one, other) in enumerate(zip(eager.losses, compiled.losses, strict=True)):
        if not abs(one - other) <= row.tolerance * abs(one):
            yield f"loss: {other:.8g} at step {step}, {one:.8g} in eager mode"
    for step, (these, those) in enumerate(zip(eager.gradients, compiled.gradients, strict=True)):
        for name, one in these.items():
            off = _apart(one, those[name])
            if not off <= row.tolerance:
                yield f"gradients: {name} is {off:.1e} off at step {step}"


def _graphs(compiled: Ran) -> Iterator[str]:
    if compiled.breaks:
        yield f"graphs broke: {compiled.breaks}"
    if not compiled.graphs[-1]:
        yield "nothing was compiled"
    if compiled.graphs[1] != compiled.graphs[-1]:
        yield f"graphs until the end of each step: {compiled.graphs}"


def _apart(one: Tensor, other: Tensor) -> float:
    """The largest distance, of the largest number; 0 where the same numbers are not finite."""
    one, other = one.double(), other.double()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return float("inf")
    apart, size = (one - other).nan_to_num(0, 0, 0).abs().max(), one.nan_to_num(0, 0, 0).abs().max()
    return float(apart / size) if apart else 0.0
