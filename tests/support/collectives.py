"""What dtype numbers have where they cross between ranks, and where a norm takes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
