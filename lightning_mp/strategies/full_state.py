"""Whole weights and optimizer states into an FSDP2 model, whoever wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType
from torch.optim import Optimizer

from lightning_mp.checkpoints.formats import kind_of
from lightning_mp.checkpoints.reading import read_full


def is_own(path: Any) -> bool:
    """Whether ``path`` is a folder of shards with the weights where Lightning's FSDP2 strategy puts them."""
    if kind_of(path) != "sharded":
        return False
    planned = FileSystemReader(Path(path)).read_metadata().planner_data or {}
    return any(place[0] == "state_dict" for place in planned.values())


def read(path: Any, weights_only: bool | None) -> dict[str, Any]:
    """The whole checkpoint; says what of it is left out."""
    checkpoint = read_full(path, weights_only=weights_only)
    left_out = checkpoint.pop("optimizer_left_out", None)
    if left_out:
        rank_zero_info(f"{left_out} The learning rate goes on from the scheduler.")
    return checkpoint


def load(model: nn.Module, optimizers: Sequence[Optimizer], checkpoint: Mapping[str, Any], *, strict: bool) -> None:
    """Each rank takes its part of ``checkpoint``, which it holds whole."""
    options = StateDictOptions(full_state_dict=True, strict=strict)
    set_model_state_dict(model, dict(checkpoint["state_dict"]), options=options)
    for optimizer, state in zip(optimizers, checkpoint.get("optimizer_states") or (), strict=False):
        if not state["state"]:  # nothing is kept (plain SGD); torch would make a step to see what there is
            _load_groups(optimizer, state)
            continue
        named = cast("Any", FullyShardedDataParallel).rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, model)
        set_optimizer_state_dict(model, optimizer, named, options=options)


def _load_groups(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
