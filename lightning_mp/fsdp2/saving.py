"""Write and read folders of shards, on any path that fsspec knows.

A folder is written at once, or from a copy on the host while training goes on.
"""

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from io import BytesIO
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as shards
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from lightning_mp.checkpoints import folders, formats
from lightning_mp.checkpoints.formats import OPTIMIZER, SHARDED_EXTRA
from lightning_mp.compat.torch import shard_storage
from lightning_mp.modules.patterns import plain_name
from lightning_mp.numerics.dtypes import map_tensors

_WEIGHTS = "state_dict"


def _write(path: str, content: Mapping[str, Any], group: Any, *, extra: bytes | None, first_of_node: bool) -> None:
    """Write this rank's shards of ``content``. A collective over ``group``.

    ``extra`` is the rest of the checkpoint as ``torch.save`` wrote it, on the first rank only.
    """
    if first_of_node:
        folders.begin(path)
    dist.barrier(group)
    place = folders.unfinished(path)
    if extra is not None:
        formats.write_bytes(f"{place}/{SHARDED_EXTRA}", extra)
    # the index is written last, so that a folder whose writing broke off is no checkpoint
    shards.save({**content}, storage_writer=shard_storage(place, writes=True), process_group=group)
    dist.barrier(group)
    if first_of_node:
        folders.finish(path)


def _remove_after(writing: Future[None], remove: Callable[[], object]) -> None:
    """Call ``remove`` if ``writing`` ended without an error."""
    if writing.exception() is None:
        remove()


class Saves:
    """A writer of folders of shards, at most one at a time.

    If ``later``, tensors are copied to the host, and a thread writes them over its own gloo process
    group. A rank waits for the others in that group for at most ``timeout``. ``None`` is torch's
    default.
    """

    def __init__(self, *, later: bool, timeout: timedelta | None = None) -> None:
        self._later, self._timeout = later, timeout
        self._thread: ThreadPoolExecutor | None = None
        self._group: Any = None
        #: the thread's tasks: write a checkpoint, then remove older ones
        self._writing: Future[None] | None = None
        self._removing: list[Future[None]] = []

    def save(self, checkpoint: dict[str, Any], path: str, *, first: bool, first_of_node: bool, fitting: bool) -> None:
        """Write Lightning's ``checkpoint`` into the folder ``path``.

        A collective: every rank calls it.

        The weights and optimizer states are taken out of ``checkpoint``. Outside of a fit the
        folder is written at once even if ``later``, because nothing would wait for the thread.

        Raises the error that ended the previous save.

        Args:
            checkpoint: the checkpoint as Lightning makes it.
            path: the folder.
            first: True on the rank that writes all but the shards.
            first_of_node: True on the rank of a node that makes and renames the folder.
            fitting: True within a fit.
        """
        self.wait()
        content = {_WEIGHTS: checkpoint.pop(_WEIGHTS)}
        states = checkpoint.pop("optimizer_states", ())
        content |= {f"{OPTIMIZER}{index}": state for index, state in enumerate(states)}
        extra = BytesIO()
        if first:
            torch.save(checkpoint, extra)
        write = partial(_write, path, extra=extra.getvalue() if first else None, first_of_node=first_of_node)
        if not (self._later and fitting):
            write(content, None)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1)
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        copied = map_tensors(content, lambda tensor: tensor.detach().to("cpu", copy=True))
        self._writing = self._thread.submit(write, copied, self._group)

    def remove(self, remove: Callable[[], object]) -> None:
        """Call ``remove``, which deletes an older checkpoint, at once or after the present save.

        The older checkpoint stays if that save fails.
        """
        writing = self._writing
        if writing is None or self._thread is None:
            remove()
        else:
            self._removing.append(self._thread.submit(_remove_after, writing, remove))

    def wait(self) -> None:
        """Wait until the present save is complete and older checkpoints are removed.

        Raises the error that ended the save or a removal.
        """
        writing, self._writing = self._writing, None
        removing, self._removing = self._removing, []
        if writing is not None:
            writing.result()
        for removal in removing:
            removal.result()

    def close(self) -> None:
        """Wait as ``wait`` does, then end the thread and its process group, also after an error."""
        thread, self._thread = self._thread, None
        try:
            self.wait()
        finally:
            if thread is not None:
                thread.shutdown()
                dist.destroy_process_group(self._group)


def load_weights(path: str, model: nn.Module, names: Collection[str], *, strict: bool) -> None:
    """Load this rank's shards of a folder's weights into ``model``. Every rank calls it.

    ``names`` are the names of the weights in the folder. A weight of ``model`` that the folder
    lacks keeps its value.

    Raises:
        RuntimeError: ``strict``, and the folder lacks a weight of ``model``.
    """
    own_names = {plain_name(name): name for name in model.state_dict()}
    weights = {name: value for name, value in get_model_state_dict(model).items() if name in names}
    content = {_WEIGHTS: weights}
    shards.load(content, storage_reader=shard_storage(path))
    model.load_state_dict({own_names[name]: value for name, value in content[_WEIGHTS].items()}, strict=strict)


def load_states(path: str, model: nn.Module, optimizers: Any) -> None:
    """Load this rank's shards of a folder's optimizer states into ``optimizers``.

    Every rank calls it.
    """
    for index, optimizer in enumerate(optimizers):
        name = f"{OPTIMIZER}{index}"
        state = {name: get_optimizer_state_dict(model, optimizer)}
        shards.load(state, storage_reader=shard_storage(path))
        options = StateDictOptions(cpu_offload=True)
        set_optimizer_state_dict(model, optimizer, optim_state_dict=state[name], options=options)


def load_extra(path: str, *, weights_only: bool | None) -> dict[str, Any]:
    """Return the part of a folder's checkpoint that is not in shards."""
    return formats.load(f"{path}/{SHARDED_EXTRA}", weights_only=weights_only)
