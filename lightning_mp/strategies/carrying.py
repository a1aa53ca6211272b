"""Checkpoints that another strategy goes on from: what is written beside the weights, and how foreign ones are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info

from lightning_mp.checkpoints.formats import Kind, kind_of
from lightning_mp.checkpoints.reading import read_full
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
        if kind_of(path) in self.own_formats:
            return super().load_checkpoint(path, weights_only=weights_only)
        checkpoint = read_full(path)
        left_out = checkpoint.pop("optimizer_left_out", None)
        if left_out:
            rank_zero_info(f"{left_out} The learning rate goes on from the scheduler.")
        self.load_foreign(checkpoint)
        return checkpoint

    def load_foreign(self, checkpoint: dict[str, Any]) -> None:
        """Load a whole checkpoint where Lightning leaves that to the strategy."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load as the host does; without any state the learning rates are those the schedulers had come to."""
        super().load_optimizer_state_dict(checkpoint)
        if not checkpoint.get("optimizer_states"):
            set_learning_rates(self.optimizers, checkpoint)


def set_learning_rates(optimizers: Any, checkpoint: Mapping[str, Any]) -> None:
    """Give each optimizer's groups the learning rates that the checkpoint's schedulers had come to."""
    for optimizer, state in zip(optimizers, checkpoint.get("lr_schedulers") or (), strict=False):
        rates = cast("list[float]", state.get("_last_lr") or ())
        for group, rate in zip(optimizer.param_groups, rates, strict=False):
            group["lr"] = rate if not isinstance(group["lr"], torch.Tensor) else group["lr"].fill_(rate)
