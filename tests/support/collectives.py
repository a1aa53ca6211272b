"""What crosses between ranks: the dtype of numbers, also where a norm takes them, and how many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@contextmanager
def recorded(seen: dict[str, set[str]]) -> Iterator[None]:
    """The dtypes that collectives and layer norms are called with."""
    places = [(dist, name, "reduced") for name in dir(dist) if name.lstrip("_").startswith("reduce_scatter")]
    places += [(dist, name, "gathered") for name in dir(dist) if name.lstrip("_").startswith("all_gather")]
    places.append((torch.nn.functional, "layer_norm", "normed"))
    before = [(place, name, getattr(place, name)) for place, name, _ in places]

    def recording(call: Any, what: str) -> Any:
        def record(*args: Any, **options: Any) -> Any:
            tensors = [item for item in (*args, *options.values()) if isinstance(item, Tensor)]
            found = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
            seen.setdefault(what, set()).update(found - {"uint8"})  # uint8: objects
            return call(*args, **options)

        return record

    for (place, name, call), (_, _, what) in zip(before, places, strict=True):
        if callable(call) and not isinstance(call, type):
            setattr(place, name, recording(call, what))
    try:
        yield
    finally:
        for place, name, call in before:
            setattr(place, name, call)


#: flags, norms and counts: no parameter or gradient of a test's model is as small
SMALL = 64


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[int]] = {"gathered": [], "reduced": []}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place, _, name = str(func).partition(".")
        if place == "c10d":
            sizes = [leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            # the whole, beside the rank's part of it; a list of all parts, and the rank's once more
            size = sum(sizes[:-1]) if name.startswith("allgather_.") else max(sizes, default=0)
            what = "gathered" if "allgather" in name else "reduced" if "reduce" in name else None
            if what is not None and size > SMALL:
                self.seen[what].append(size)
        return func(*args, **(kwargs or {}))


class Moved(Callback):
    """Bytes that each step gathers and reduces, collective by collective, whoever calls them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, list[int]]] = []
        self._calls: _Calls | None = None

    def on_train_batch_start(self, *_: Any) -> None:
        self._calls = _Calls()
        self._calls.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        assert self._calls is not None
        self._calls.__exit__(None, None, None)
        self.steps.append(self._calls.seen)
