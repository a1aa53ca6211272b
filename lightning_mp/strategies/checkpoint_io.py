"""Checkpoints that every strategy can resume from: what is written beside the weights, and how others' are read."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_mp.checkpoints import folders
from lightning_mp.checkpoints.consolidate_file import read_full
from lightning_mp.checkpoints.formats import (
    CheckpointFormatError,
    Kind,
    by_parameter,
    is_remote_path,
    kind_of,
    plain_names,
    without_file_protocol,
)
from lightning_mp.compat.lightning import TorchCheckpointIO, TrainerFn, rank_zero_info, trainer_of
from lightning_mp.compat.torch import last_rates
from lightning_mp.errors import Faults
from lightning_mp.fsdp2.units import share_buffers
from lightning_mp.modules.patterns import plain_name
from lightning_mp.modules.remote import is_remote
from lightning_mp.numerics.dtypes import TORCH_DTYPES
from lightning_mp.strategies.base import RunsPlan

#: the checkpoint's key for what this package adds to Lightning's own
NOTES = "lightning_mp"
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class PlanStrategy(RunsPlan):
    """Runs a plan; writes the dtypes beside the weights, and loads checkpoints of other strategies."""

    #: the format that the host strategy reads itself, if any
    own_format: Kind | None = "file"

    @property
    def saves_folders(self) -> bool:
        """Whether every rank writes files of its own, instead of one by the CheckpointIO."""
        return False

    def check_remote_folders(self, faults: Faults) -> None:
        """Note a remote folder that a ModelCheckpoint of the fit would save DeepSpeed's files to."""
        trainer = trainer_of(self.lightning_module)
        fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        saving: list[Any] = cast("Any", trainer).checkpoint_callbacks if fitting else []
        folders = dict.fromkeys(getattr(callback, "dirpath", None) or "" for callback in saving)
        for folder in filter(is_remote_path, folders):
            problem, fix = _remote(folder)
            faults.add(problem, fix=fix)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save as the host does, with the dtypes that parameters and buffers are stored in.

        Raises:
            CheckpointFormatError: a remote path for a folder of shards.
        """
        checkpoint[NOTES] = {
            "dtypes": self.stored_dtypes(),
            "strategy": type(self).__name__,
            "world_size": getattr(self, "world_size", 1),
        }
        path = str(without_file_protocol(self.broadcast(filepath)))
        if self.own_format == "deepspeed" and is_remote_path(path):
            raise CheckpointFormatError(*_remote(path))
        if self.saves_folders:
            self._save_folder(checkpoint, path, storage_options)
        elif not (is_remote_path(path) or self._users_io):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        elif self.is_global_zero:  # Lightning's strategies of shards would take the path for that of a local file
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def _save_folder(self, checkpoint: dict[str, Any], path: str, storage_options: Any) -> None:
        first_of_node = cast("Any", self).local_rank == 0
        if first_of_node:
            folders.begin(path)
        self.barrier()
        super().save_checkpoint(checkpoint, folders.unfinished(path), storage_options=storage_options)
        self.barrier()  # the Trainer has one afterwards
        if first_of_node:
            folders.finish(path)

    def share_buffers(self) -> None:
        """Broadcast rank 0's saved buffers, as under DDP: the model is evaluated with what is saved."""
        share_buffers(self._user_module, cast("Any", self).root_device)

    def stored_dtypes(self) -> dict[str, str]:
        """The short dtype name of every floating parameter and buffer."""
        named = (*self._user_module.named_parameters(), *self._user_module.named_buffers())
        return {plain_name(name): _NAMES[tensor.dtype] for name, tensor in named if tensor.dtype in _NAMES}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load as the host does; every rank reads all of a checkpoint of another strategy.

        Raises:
            CheckpointFormatError: nothing at the path is a checkpoint.
        """
        path = str(without_file_protocol(self.broadcast(checkpoint_path)))
        with self._optimizers_while_fitting():
            if self._format(path) != "file":
                if self.reads(path):
                    return self.load_folder(path, weights_only)
                checkpoint = read_full(path, weights_only=weights_only)
            else:
                # torch rebuilds tensors of a subclass (torchao's optimizer state) for a device that has a name only
                device = {} if self._users_io else {"map_location": "cpu"}
                checkpoint = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only, **cast("Any", device))
                if self.own_format == "file":
                    return checkpoint
                checkpoint["state_dict"] = plain_names(checkpoint["state_dict"])
            if left_out := checkpoint.pop("optimizer_left_out", None):
                rank_zero_info(f"{left_out} The learning rate is the scheduler's.")
            self.load_full(checkpoint)
        return checkpoint

    def load_folder(self, path: str, weights_only: bool | None) -> dict[str, Any]:
        """Load a folder of the host's own format as the host does."""
        return super().load_checkpoint(path, weights_only=weights_only)

    @contextmanager
    def _optimizers_while_fitting(self) -> Generator[None, None, None]:
        """Weights alone are loaded to evaluate: the optimizers that are left from a fit may be another module's."""
        trainer, kept = trainer_of(self.lightning_module), self.optimizers
        if trainer is not None and trainer.state.fn != TrainerFn.FITTING:
            self.optimizers = []
        try:
            yield
        finally:
            self.optimizers = kept

    @property
    def _users_io(self) -> bool:
        return type(self.checkpoint_io) is not TorchCheckpointIO

    def _format(self, path: Any) -> Kind:
        """What lies at ``path``; a "file" is what the CheckpointIO reads, a user's plugin whatever it wrote."""
        try:
            return kind_of(path)
        except CheckpointFormatError:
            if self._users_io:
                return "file"
            raise

    def reads(self, path: Any) -> bool:
        """Whether the host strategy can be left to read what lies at ``path``.

        Raises:
            CheckpointFormatError: nothing at the path is a checkpoint.
        """
        return self._format(path) == self.own_format

    def load_full(self, checkpoint: dict[str, Any]) -> None:
        """Load a full checkpoint where Lightning leaves that to the strategy."""

    def load_shards(self, checkpoint: dict[str, Any]) -> None:
        """Load what this rank holds of full weights, and while fitting of full optimizer states.

        Lightning's own way takes the numbers in an optimizer's state for positions in the *model*, which they are not
        where an optimizer has several groups or leaves parameters out.

        Raises:
            RuntimeError: under ``strict_loading``, names that the checkpoint or the module lacks.
        """
        module, full = self._user_module, checkpoint.pop("state_dict")
        here, strict = module.state_dict(), module.strict_loading
        gone = {name for name, one in module.named_parameters(remove_duplicate=False) if is_remote(one)}
        if gone and strict and (apart := here.keys() ^ full.keys()):
            raise RuntimeError(f"only one of the checkpoint and {type(module).__name__} has {', '.join(sorted(apart))}")
        shards = {name: sharded_like(here.get(name), value) for name, value in full.items() if name not in gone}
        module.load_state_dict(shards, strict=strict and not gone)
        states: list[Any] = checkpoint.get("optimizer_states") or []
        if self.optimizers and not states:
            set_learning_rates(self.optimizers, checkpoint)
        for optimizer, state in zip(self.optimizers, states, strict=bool(self.optimizers and states)):
            optimizer.load_state_dict(by_parameter(state, optimizer, _held))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load as the host does; without any state the learning rates are those of the schedulers."""
        super().load_optimizer_state_dict(checkpoint)
        if not checkpoint.get("optimizer_states"):
            set_learning_rates(self.optimizers, checkpoint)


def _remote(path: Any) -> tuple[str, str]:
    fix = "give ModelCheckpoint(dirpath=...) a local folder, or use strategy='mp_fsdp2', whose shards go anywhere"
    return f"{str(path)!r} for DeepSpeed's checkpoints, whose files go to a local disk alone", fix


def sharded_like(target: Any, full: Any) -> Any:
    """``full``, sharded as ``target`` is if that is a DTensor of its shape."""
    if not isinstance(target, DTensor) or not isinstance(full, Tensor) or full.shape != target.shape:
        return full
    return distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)


def _held(parameter: Tensor | None, values: Mapping[str, Any]) -> dict[str, Any] | None:
    if parameter is not None and is_remote(parameter):
        return None
    return {key: sharded_like(parameter, value) for key, value in values.items()}


def set_learning_rates(optimizers: Any, checkpoint: Mapping[str, Any]) -> None:
    """Give each optimizer's groups the learning rates of the checkpoint's schedulers."""
    for optimizer, state in zip(optimizers, checkpoint.get("lr_schedulers") or (), strict=False):
        for group, rate in zip(optimizer.param_groups, last_rates(state), strict=False):
            group["lr"] = rate if not isinstance(group["lr"], torch.Tensor) else group["lr"].fill_(rate)
