"""When and in which format FSDP2 gathers: the unit around a whole step, FP8 layers."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_mp.compat import torch_sharding as sharding_compat
from lightning_mp.compat import torchao
from lightning_mp.compat.torch import norms
from lightning_mp.errors import Faults
from lightning_mp.modules.fp8 import is_converted
from lightning_mp.strategies.sharding import Sharding


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
            sharding_compat.before_backward_from(loss, self._root)

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
            if module is not self._module and id(module) not in others and [*module.parameters(recurse=False)]
        ]

    def _gather(self, _module: nn.Module, _inputs: Any) -> None:
        assert self._root is not None
        self._root.unshard()  # does nothing where it is gathered


@dataclass(eq=False)
class _InFP8:
    """What FSDP2 asks a shard for: what to send, and what to make of what came. Not copied with the shard."""

    emulate: bool
    rows: int
    local: Tensor = field(init=False)
    scale: Tensor = field(init=False)

    def __deepcopy__(self, memo: Any) -> _InFP8:
        return self

    def before(self, mesh: Any) -> tuple[tuple[Tensor, ...], Tensor]:
        # As bytes: gloo has no FP8.
        data = torchao.rounded(self.local.detach(), self.scale).view(torch.uint8)
        missing = -(-self.rows // mesh.size()) - data.shape[0]
        return (nn.functional.pad(data, (0, 0, 0, missing)) if missing else data,), self.scale

    def after(self, outputs: tuple[Tensor, ...], scale: Tensor, dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is None:
            return torchao.weight(outputs[0], scale, dtype, emulate=self.emulate), ()
        torchao.set_scale(out, scale)
        return None


def check_fp8_gather(how: Sharding, tensor_parallel: int, faults: Faults) -> None:
    """Note with what else weights cannot be gathered in FP8."""
    again = how.options.get("reshard_after_forward")
    beside = {
        f"tensor_parallel={tensor_parallel}": tensor_parallel > 1,
        "cpu_offload=True": how.cpu_offload,
        f"reshard_after_forward={again!r}": isinstance(again, int) and not isinstance(again, bool),
        "compile=True": how.compile,
    }
    for given in (word for word, holds in beside.items() if holds):
        faults.add(f"FP8(all_gather=True) beside {given}", f"leave out all_gather=True, or {given}")


class FP8Gather:
    """Switches between gathering ``modules``' weights in FP8, while the plan trains, and as they are stored.

    The shards stay plain fp32 tensors: what FSDP2 asks for hangs on them as attributes, which no state dict has.
    """

    def __init__(self, root: nn.Module, modules: Iterable[nn.Module], group: Any, *, emulate: bool) -> None:
        owners = {id(module.weight): module for module in modules}
        ways = [one for one in sharding_compat.GatherWays.of(root) if id(one.shard) in owners]
        self._ways = [(one, _InFP8(emulate, one.shard.shape[0])) for one in ways]
        self._owners = [owners[id(one.shard)] for one in ways]
        self._group = group

    def before_step(self, *, in_fp8: bool) -> None:
        """Before a step: weights do not change within one, so that no scale is ever of other weights than those."""
        if in_fp8:
            self._scale()
        for (ways, shard), module in zip(self._ways, self._owners, strict=True):
            as_fp8 = in_fp8 and is_converted(module)  # one that fell back to bf16 no longer is
            ways.take("fp8" if as_fp8 else "stored", (shard.before, shard.after) if as_fp8 else None)

    @torch.no_grad()
    def _scale(self) -> None:
        for ways, shard in self._ways:
            shard.local = ways.local()
        amax = torch.stack(list(norms([shard.local for _, shard in self._ways], torch.inf)))
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=self._group)
        for (_, shard), scale in zip(self._ways, torchao.scales(amax).unbind(), strict=True):
            shard.scale = scale
