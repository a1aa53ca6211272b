"""The unit around a whole LightningModule: it stays gathered while a step runs, and is sharded outside."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_mp.compat.torch_sharding import before_backward_from


class RootUnit:
    """Keeps the root's weights gathered where the step uses them.

    ``fully_shard`` gathers the root for its forward, which here is the whole step, and shards it again in the backward
    pass that starts from the forward's output. Manual optimization runs backward *inside* the step: that pass is
    announced by ``before_backward``, and modules that use the root's weights after it gather them again.
    """

    def __init__(self, module: nn.Module) -> None:
        self._root = module if isinstance(module, FSDPModule) else None
        self._module, self._backward_inside = module, False

    @contextmanager
    def step(self, *, backward_inside: bool) -> Generator[None, None, None]:
        """Around one step of the user's."""
        if self._root is None or not backward_inside:
            yield
            return
        handles = [module.register_forward_pre_hook(self._gather, prepend=True) for module in self._holders()]
        self._backward_inside = True
        try:
            yield
        finally:
            self._backward_inside = False
            for handle in handles:
                handle.remove()

    def before_backward(self, loss: Tensor) -> None:
        """Announce a backward pass from ``loss`` within the step."""
        if self._backward_inside and loss.requires_grad:
            assert self._root is not None
            before_backward_from(loss, self._root)

    def reshard(self) -> None:
        """Reshard what is gathered: weights that are written to afterwards are the sharded ones, which last."""
        if self._root is not None:
            self._root.reshard()

    def _holders(self) -> list[nn.Module]:
        """The modules below the root whose own weights are in its unit."""
        inner = (module for module in self._module.modules() if isinstance(module, FSDPModule))
        others = {id(part) for unit in inner if unit is not self._module for part in unit.modules()}
        return [
            module
            for module in self._module.modules()
            if module is not self._module and id(module) not in others and _owns(module)
        ]

    def _gather(self, _module: nn.Module, _inputs: Any) -> None:
        assert self._root is not None
        self._root.unshard()  # does nothing where it is gathered


def _owns(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))
