"""Backward passes that a user runs in a step past Lightning, ``loss.backward()`` for ``self.manual_backward(loss)``."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from lightning_mp.compat.torch import in_backward
from lightning_mp.numerics import graph
from lightning_mp.numerics.nested import tensors_in


@contextmanager
def found(
    trained: Callable[[], set[int]], around: Callable[[Any], AbstractContextManager[Any]]
) -> Generator[None, None, None]:
    """Enter ``around(tensors)`` for each backward pass that would give one of ``trained``, by ``id``, a gradient.

    ``trained()`` is empty while Lightning runs one.
    """
    own: Any = torch.autograd.backward

    def backward(tensors: Any, *args: Any, inputs: Any = None, **kwargs: Any) -> None:
        asked = set[int]() if in_backward() else trained()  # in a backward pass a region is recomputed
        if asked:
            asked &= graph.leaves(tensors) if inputs is None else {id(one) for one in tensors_in(inputs)}
        if not asked:
            own(tensors, *args, inputs=inputs, **kwargs)
            return
        with around(tensors):
            own(tensors, *args, inputs=inputs, **kwargs)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = own
