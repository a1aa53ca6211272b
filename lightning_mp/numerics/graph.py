"""The graph behind tensors, as a backward pass would go through it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_mp.numerics.nested import tensors_in


def nodes(outputs: Any) -> set[Any]:
    """The nodes that a backward pass from the tensors in ``outputs`` comes to."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
    found = set(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                waiting.append(node)
    return found


def leaves(outputs: Any) -> set[int]:
    """The ``id`` of each tensor in which it would accumulate a gradient."""
    own = {id(tensor) for tensor in tensors_in(outputs) if tensor.is_leaf and tensor.requires_grad}
    below: list[Tensor] = [node.variable for node in nodes(outputs) if hasattr(node, "variable")]
    return own | {id(tensor) for tensor in below}
