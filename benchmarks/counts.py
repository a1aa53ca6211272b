"""Counts that hold on any machine, for docs/reference/counts.md: what a step dispatches, waits for and sends.

``python -m benchmarks.counts``: each mode under each strategy beside Lightning's own, two processes on gloo.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.harness import fit, quietly, tokens
from benchmarks.sharded import ROWS, _ours
from support.ranks import Ranks  # on the path since benchmarks.sharded

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/counts.md"
BEGIN, END = "<!-- written by make bench -->", "<!-- end of what it writes -->"
STEPS = 4


class Dispatched(TorchDispatchMode, Callback):
    """In the last batch: operators, reads of a tensor's value, collectives and the bytes they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"operators": 0, "syncs": 0, "collectives": 0, "bytes": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.counts["operators"] += 1
        self.counts["syncs"] += name.startswith("aten._local_scalar_dense")
        if name.startswith("c10d.") and "barrier" not in name:
            self.counts["collectives"] += 1
            self.counts["bytes"] += sum(x.nbytes for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        return func(*args, **(kwargs or {}))

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == STEPS - 1:
            self.__enter__()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == STEPS:
            self.__exit__(None, None, None)


@dataclass(frozen=True)
class Counted:
    """The counts of one side of one row; run by every rank."""

    row: int
    mode: str
    ours: bool

    def run(self) -> dict[str, int]:
        """Train a few steps and count in the last."""
        quietly()
        name, theirs, _ = ROWS[self.row]
        torch.manual_seed(0)
        arguments, module = _ours(name, self.mode) if self.ours else theirs(self.mode)
        clip = None if name == "fsdp1" else 1.0  # Lightning's FSDP1 cannot clip by norm
        counts = Dispatched()
        two = {"accelerator": "cpu", "devices": 2, "gradient_clip_val": clip, "callbacks": [counts]}
        fit(module, tokens(), None, STEPS, **two, **arguments)
        return counts.counts


def main() -> None:
    """Count, print and write the page."""
    lines = ["| strategy | mode | operators | device syncs | collectives | MB |", *["| --- " * 6 + "|"]]
    with Ranks(seconds=300) as ranks:
        for row, (name, _, modes) in enumerate(ROWS):
            for mode in modes:
                stock, plan = (ranks.run(Counted(row, mode, ours))[0] for ours in (False, True))
                cells = [f"{stock[key]} → {plan[key]}" for key in ("operators", "syncs", "collectives")]
                cells.append(f"{stock['bytes'] / 1e6:.1f} → {plan['bytes'] / 1e6:.1f}")
                lines.append(f"| {name} | `{mode}` | {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table = "\n".join([BEGIN, "", *lines, "", END])
    PAGE.write_text(f"{before}{table}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
