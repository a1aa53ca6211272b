"""Checkpoints that another strategy goes on from: what is written beside the weights, and how foreign ones are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_mp.checkpoints.formats import Kind, kind_of
from lightning_mp.checkpoints.load import read_full
from lightning_mp.checkpoints.sharded import entries
from lightning_mp.compat.lightning import Strategy, rank_zero_info
from lightning_mp.compat.torch import last_rates
from lightning_mp.numerics.dtypes import TORCH_DTYPES

#: the checkpoint's key for what this package notes beside Lightning's own
NOTES = "lightning_mp"
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_Base = Strategy if TYPE_CHECKING else object


class CarriesCheckpoints(_Base):
    """Writes the dtypes beside the weights, and takes up checkpoints of other strategies."""

    #: the formats that the host strategy reads itself
    own_formats: frozenset[Kind] = frozenset({"file"})

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save as the host does, with the dtypes that parameters and buffers are stored in."""
        checkpoint[NOTES] = {
            "dtypes": self.stored_dtypes(),
            "strategy": type(self).__name__,
            "world_size": getattr(self, "world_size", 1),
        }
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def stored_dtypes(self) -> dict[str, str]:
        """The short dtype name of every floating parameter and buffer."""
        module = self.lightning_module
        assert module is not None
        named = (*module.named_parameters(), *module.named_buffers())
        return {name: _NAMES[tensor.dtype] for name, tensor in named if tensor.dtype in _NAMES}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load as the host does; a checkpoint of another strategy is read whole, by every rank for itself.

        Raises:
            CheckpointFormatError: nothing at the path is a checkpoint.
        """
        path = self.broadcast(checkpoint_path)
        if self.reads(path):
            return super().load_checkpoint(path, weights_only=weights_only)
        checkpoint = read_full(path, weights_only=weights_only)
        left_out = checkpoint.pop("optimizer_left_out", None)
        if left_out:
            rank_zero_info(f"{left_out} The learning rate goes on from the scheduler.")
        self.load_foreign(checkpoint)
        return checkpoint

    def reads(self, path: Any) -> bool:
        """Whether the host strategy can be left to read what lies at ``path``.

        Raises:
            CheckpointFormatError: nothing at the path is a checkpoint.
        """
        return kind_of(path) in self.own_formats

    def load_foreign(self, checkpoint: dict[str, Any]) -> None:
        """Load a whole checkpoint where Lightning leaves that to the strategy."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load as the host does; without any state the learning rates are those the schedulers had come to."""
        super().load_optimizer_state_dict(checkpoint)
        if not checkpoint.get("optimizer_states"):
            set_learning_rates(self.optimizers, checkpoint)


class CarriesDTensors(CarriesCheckpoints):
    """The same where parameters are DTensors: whole tensors are cut as the parameters are.

    Lightning's own reading of a file takes the numbers in an optimizer's state for places in the *model*, which they
    are not where an optimizer has several groups or leaves parameters out.
    """

    own_formats: frozenset[Kind] = frozenset({"sharded"})

    def reads(self, path: Any) -> bool:
        """Whether it is a folder of FSDP2's that holds a state for each parameter that has one here."""
        if not super().reads(path):
            return False
        held = entries(Path(path))
        module = self.lightning_module
        assert module is not None
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        wanted = {
            f"optimizer_{index}.state.{names[id(parameter)]}"
            for index, optimizer in enumerate(self.optimizers)
            for parameter in _parameters(optimizer)
        }
        return "state_dict" in {entry.partition(".")[0] for entry in held} and wanted <= {
            entry.rpartition(".")[0] for entry in held
        }

    def load_foreign(self, checkpoint: dict[str, Any]) -> None:
        """Cut whole weights, and while fitting whole optimizer states, into what this rank holds."""
        module = self.lightning_module
        assert module is not None
        here: dict[str, Any] = module.state_dict()
        whole: dict[str, Any] = checkpoint.pop("state_dict")
        parts = {name: _like(here.get(name), value) for name, value in whole.items()}
        module.load_state_dict(parts, strict=module.strict_loading)
        if not self.optimizers:
            return
        states: list[Any] = checkpoint.get("optimizer_states") or []
        if not states:
            set_learning_rates(self.optimizers, checkpoint)
        for optimizer, state in zip(self.optimizers, states, strict=bool(states)):
            optimizer.load_state_dict(_cut(state, optimizer))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _cut(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """A plain optimizer's state with each whole tensor cut as its parameter is."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    # Groups of other sizes are refused by the optimizer itself.
    parameters = dict(zip(numbers, _parameters(optimizer), strict=False))
    cut = {
        number: {key: _like(parameters.get(number), value) for key, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": cut}


def _like(target: Any, whole: Any) -> Any:
    """``whole``, cut as ``target`` is if that is a part of something of its shape."""
    if not isinstance(target, DTensor) or not isinstance(whole, Tensor) or whole.shape != target.shape:
        return whole
    return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)


def set_learning_rates(optimizers: Any, checkpoint: Mapping[str, Any]) -> None:
    """Give each optimizer's groups the learning rates that the checkpoint's schedulers had come to."""
    for optimizer, state in zip(optimizers, checkpoint.get("lr_schedulers") or (), strict=False):
        for group, rate in zip(optimizer.param_groups, last_rates(state), strict=False):
            group["lr"] = rate if not isinstance(group["lr"], torch.Tensor) else group["lr"].fill_(rate)
