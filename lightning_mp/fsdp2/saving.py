"""Folders of shards, written to any path of fsspec's: at once, or from a copy on the host while training goes on."""

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
    """Write one rank's shards, and on the first rank what else there is, as ``torch.save`` wrote it."""
    if first_of_node:
        folders.begin(path)
    dist.barrier(group)
    place = folders.unfinished(path)
    if extra is not None:
        formats.write_bytes(f"{place}/{SHARDED_EXTRA}", extra)
    # the index comes last, so that nothing of a folder whose writing was broken off is taken for a checkpoint
    shards.save({**content}, storage_writer=shard_storage(place, writes=True), process_group=group)
    dist.barrier(group)
    if first_of_node:
        folders.finish(path)


def _remove_after(writing: Future[None], remove: Callable[[], object]) -> None:
    """Remove an older checkpoint if ``writing``, which has ended, did not fail."""
    if writing.exception() is None:
        remove()


class Saves:
    """Writes folders of shards, at most one at a time.

    ``later`` copies to the host what is to be written, and writes it in a thread, over a process group of its own.
    A rank waits for the others in that group for at most ``timeout``, or as long as torch does if it is None.
    """

    def __init__(self, *, later: bool, timeout: timedelta | None = None) -> None:
        self._later, self._timeout = later, timeout
        self._thread: ThreadPoolExecutor | None = None
        self._group: Any = None
        #: what the thread has to do: write a checkpoint, and then remove older ones
        self._writing: Future[None] | None = None
        self._removing: list[Future[None]] = []

    def save(self, checkpoint: dict[str, Any], path: str, *, first: bool, first_of_node: bool, fitting: bool) -> None:
        """Write a checkpoint of Lightning's; every rank calls it. Outside of a fit nothing would wait for the thread.

        Raises whatever ended the save before.
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
        """Remove an older checkpoint at once, or once the one that is being written is whole.

        It stays if that one does not become whole.
        """
        writing = self._writing
        if writing is None or self._thread is None:
            remove()
        else:
            self._removing.append(self._thread.submit(_remove_after, writing, remove))

    def wait(self) -> None:
        """Wait until what is being written is whole, and older checkpoints are removed.

        Raises whatever ended the writing or a removal.
        """
        writing, self._writing = self._writing, None
        removing, self._removing = self._removing, []
        if writing is not None:
            writing.result()
        for removal in removing:
            removal.result()

    def close(self) -> None:
        """Wait, and give the thread and its process group back."""
        thread, self._thread = self._thread, None
        try:
            self.wait()
        finally:
            if thread is not None:
                thread.shutdown()
                dist.destroy_process_group(self._group)


def load_weights(path: str, model: nn.Module, names: Collection[str], *, strict: bool) -> None:
    """Load each rank's shards of the weights of a folder, which are called ``names``, into ``model``.

    A weight that the folder lacks keeps its value, unless ``strict``: then ``load_state_dict`` raises a RuntimeError.
    """
    own_names = {plain_name(name): name for name in model.state_dict()}
    weights = {name: value for name, value in get_model_state_dict(model).items() if name in names}
    content = {_WEIGHTS: weights}
    shards.load(content, storage_reader=shard_storage(path))
    model.load_state_dict({own_names[name]: value for name, value in content[_WEIGHTS].items()}, strict=strict)


def load_states(path: str, model: nn.Module, optimizers: Any) -> None:
    """Load each rank's shards of the optimizer states of a folder into ``optimizers``."""
    for index, optimizer in enumerate(optimizers):
        name = f"{OPTIMIZER}{index}"
        state = {name: get_optimizer_state_dict(model, optimizer)}
        shards.load(state, storage_reader=shard_storage(path))
        options = StateDictOptions(cpu_offload=True)
        set_optimizer_state_dict(model, optimizer, optim_state_dict=state[name], options=options)


def load_extra(path: str, *, weights_only: bool | None) -> dict[str, Any]:
    """Return what a folder holds beside its shards."""
    return formats.load(f"{path}/{SHARDED_EXTRA}", weights_only=weights_only)
