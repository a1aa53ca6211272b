"""``python -m conformance.moved``: bytes a parameter, formula beside figure, into docs/reference/strategies.md."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from lightning_mp import MixedPrecisionPlan, make_strategy
from lightning_mp.errors import Faults
from lightning_mp.modules import half_weights, pins
from support import sharded_hosts
from support.collectives import Moved
from support.fsdp2_halves import MODELS, VOCABULARY, text
from support.hf import loss_of
from support.ranks import Ranks
from support.running import fit

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "strategies.md"
BEGIN, END = "<!-- bytes: written by python -m conformance.moved -->", "<!-- bytes: end -->"
COLUMNS = ("parameters", "masters", "gradients", "optimizer", "gathered", "reduced")
WORLD = 2
#: what the fault in a figure may not pass
WITHIN = 1.02
HALF = torch.bfloat16


class Language(LightningModule):
    """A Llama of three layers; sharded by hand where the host asks for that."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.by_hand = MODELS["llama"](), by_hand

    def configure_model(self) -> None:
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        if not self.by_hand or isinstance(self.model, FSDPModule):
            return
        policy = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32)
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.model.layers:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.model, batch % VOCABULARY)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Held(Callback):
    """Bytes that this rank holds between the backward pass and the step; of state, after it."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        members = list(pl_module.parameters())
        self.bytes = {
            "parameters": _bytes(getattr(member, "ds_tensor", member) for member in members),
            "masters": _bytes(_masters(optimizer)),
            "gradients": _bytes(_gradients(optimizer, members)),
        }

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        optimizer = trainer.optimizers[0]
        state = getattr(optimizer, "optimizer", optimizer).state
        moments = (value for values in state.values() for value in values.values() if isinstance(value, Tensor))
        self.bytes["optimizer"] = _bytes(value for value in moments if value.dim())


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of what lies on this rank."""
    local = (getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in tensors)
    return sum(tensor.nbytes for tensor in local)


def _masters(zero: Any) -> list[Tensor]:
    return list(getattr(zero, "single_partition_of_fp32_groups", getattr(zero, "fp32_partitioned_groups_flat", ())))


def _gradients(zero: Any, members: list[Any]) -> list[Tensor]:
    if hasattr(zero, "grad_partitions_flat_buffer"):
        return [zero.grad_partitions_flat_buffer]
    if hasattr(zero, "averaged_gradients"):
        return [one for several in zero.averaged_gradients.values() for one in several or () if one is not None]
    return [member.grad for member in members if member.grad is not None]


# ------------------------------------------------------------------ what runs


def _ours(name: str, mode: str) -> dict[str, Any]:
    plan = MixedPrecisionPlan(mode)
    whole = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    own = {"config": whole} if name.endswith("zero3") else {"device_mesh": (1, 2)} if name == "hsdp" else {}
    return {"plugins": [plan], "strategy": make_strategy(name, plan, **own)}


def _stock_zero(stage: int, how: str) -> dict[str, Any]:
    block = {"enabled": True} if how == "bf16" else {"enabled": True, "dtype": "bfloat16"}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"strategy": sharded_hosts.deepspeed(stage, zero_optimization=zero, **{how: block})}


STOCK: dict[str, Callable[[], dict[str, Any]]] = {
    "stock FSDP2, param_dtype": lambda: {"strategy": sharded_hosts.fsdp2()},
    **{f"stock ZeRO-{n}, {how}": partial(_stock_zero, n, how) for how in ("torch_autocast", "bf16") for n in (1, 2, 3)},
}
OURS = ("ddp", "fsdp2", "hsdp", "fsdp1", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")
MODES = ("32-true", "bf16-mixed")
ROWS: list[tuple[str, str]] = [(name, mode) for name in OURS for mode in MODES] + [(name, "") for name in STOCK]


@dataclass(frozen=True)
class Measured:
    """Bytes of one row: what a rank holds, and what the third step moves."""

    name: str
    mode: str

    def run(self) -> dict[str, int]:
        stock = self.name in STOCK
        arguments = STOCK[self.name]() if stock else _ours(self.name, self.mode)
        held, moved = Held(), Moved()
        module = Language(by_hand=self.name.startswith("stock FSDP2"))
        fit(module, data=text(), callbacks=[held, moved], devices=WORLD, use_distributed_sampler=False, **arguments)
        return {**held.bytes, **{what: sum(sizes) for what, sizes in moved.steps[2].items()}}


# ------------------------------------------------------------------ what it should be


@dataclass(frozen=True)
class Elements:
    """Of a model: those in blocks and the others, and which of them autocast alone computes with."""

    halves: tuple[int, int]
    others: tuple[int, int]

    @property
    def all(self) -> int:
        return sum(self.halves) + sum(self.others)


def elements() -> Elements:
    """Of the Llama."""
    model = MODELS["llama"]()
    plan = MixedPrecisionPlan("bf16-mixed")
    counts = {(half, block): 0 for half in (True, False) for block in (True, False)}
    for weight in half_weights.survey(model, pins.resolve(model, (), Faults()), plan.policy):
        counts[weight.reason is None, ".layers." in weight.name] += weight.tensor.numel()
    return Elements((counts[True, True], counts[True, False]), (counts[False, True], counts[False, False]))


def formulas(name: str, mode: str) -> dict[str, str]:
    """By column, in bytes a parameter, of W ranks.

    h is the share that autocast alone computes with, b that of blocks, hb that of both.
    """
    halves = "2h + 4(1-h)"
    cut = {"parameters": "4/W", "masters": "0", "gradients": "4/W", "optimizer": "8/W", "reduced": "4"}
    zero = {**cut, "parameters": "4", "masters": "4/W", "gathered": "4"}
    three = {"parameters": "4/W", "gathered": halves if mode != "32-true" else "4"}
    one = {"parameters": halves, "gathered": halves} if mode != "32-true" else {}
    twice = f"{halves} + 2hb + 4(b-hb)" if mode != "32-true" else "4 + 4b"
    half = {**zero, "parameters": "2", "gradients": "2/W", "gathered": "2", "reduced": "2"}
    return {
        "ddp": {**cut, "parameters": "4", "gradients": "4", "optimizer": "8", "gathered": "0"},
        "fsdp2": {**cut, "gathered": twice},
        "hsdp": {**cut, "gathered": twice, "reduced": "4 + 4/W"},
        "fsdp1": {**cut, "gathered": "4 + 4b"},
        "deepspeed_zero1": {**zero, **one},
        "deepspeed_zero2": {**zero, **one},
        "deepspeed_zero3": {**zero, **three},
        "stock FSDP2, param_dtype": {**cut, "gathered": "2 + 2b"},
        "stock ZeRO-1, torch_autocast": {**zero, "reduced": halves},
        "stock ZeRO-2, torch_autocast": {**zero, "reduced": halves},
        "stock ZeRO-3, torch_autocast": {**zero, **three, "reduced": halves},
        "stock ZeRO-1, bf16": half,
        "stock ZeRO-2, bf16": half,
        "stock ZeRO-3, bf16": {**half, "parameters": "2/W"},
    }.get(name, zero)


def expected(formula: str, of: Elements) -> float:
    """What a formula comes to."""
    shares = {"W": WORLD, "h": sum(of.halves) / of.all, "hb": of.halves[0] / of.all}
    shares["b"] = (of.halves[0] + of.others[0]) / of.all
    written = re.sub(r"(\d)([hb(])", r"\1*\2", formula)
    return float(eval(written, {"__builtins__": {}}, shares))


# ------------------------------------------------------------------ the table


def measure(ranks: Ranks | None = None) -> dict[tuple[str, str], dict[str, float]]:
    """Rank 0's bytes a parameter; DeepSpeed on its own in other processes than ``ranks``: it leaves switches behind."""
    of, found = elements(), dict[tuple[str, str], dict[str, float]]()
    with Ranks(WORLD) as apart:
        for name, mode in ROWS:
            result = (apart if ranks is None or name in STOCK else ranks).run(Measured(name, mode))[0]
            found[name, mode] = {column: result[column] / of.all for column in COLUMNS}
    return found


def table(measured: dict[tuple[str, str], dict[str, float]]) -> str:
    """The section of the page."""
    of = elements()
    lines = [f"| strategy | mode | {' | '.join(COLUMNS)} |", f"| --- | --- |{' --- |' * len(COLUMNS)}"]
    for (name, mode), row in measured.items():
        by = formulas(name, mode)
        cells = [f"{by[column]}: {row[column]:.2f}" if by[column] != "0" else "0" for column in COLUMNS]
        shown = name.replace(", torch_", " ").replace(",", "") if name in STOCK else f"mp_{name}"
        lines.append(f"| {shown} | {'fp32' if mode == '32-true' else 'bf16'} | {' | '.join(cells)} |")
    h, b = sum(of.halves) / of.all, (of.halves[0] + of.others[0]) / of.all
    shares = f"h = {h:.3f}, b = {b:.3f}, hb = {of.halves[0] / of.all:.3f}"
    return "\n".join((*lines, "", f"A Llama of {of.all:,} parameters on W = {WORLD} processes: {shares}."))


def main() -> int:
    """Measure, and write the section; exit status 1 where a figure passes its formula."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    measured, of = measure(), elements()
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(measured)}\n\n{END}{rest.partition(END)[2]}")
    bad = faults(measured, of)
    print(*bad, f"{len(bad)} figures pass their formulas", sep="\n")
    return int(bool(bad))


def faults(measured: dict[tuple[str, str], dict[str, float]], of: Elements) -> list[str]:
    """The figures that pass their formulas by more than 2 %."""
    return [
        f"{name} {mode}, {column}: {row[column]:.3f}, where {formulas(name, mode)[column]} is "
        f"{expected(formulas(name, mode)[column], of):.3f}"
        for (name, mode), row in measured.items()
        for column in COLUMNS
        if row[column] > WITHIN * expected(formulas(name, mode)[column], of)
    ]


if __name__ == "__main__":
    sys.exit(main())
