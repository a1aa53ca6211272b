"""FSDP2 gathers the weights of converted layers in FP8, with scales that are those of the whole weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_mp.compat import torchao
from lightning_mp.compat.torch import norms
from lightning_mp.compat.torch_sharding import GatherWays, fsdp2_parameters
from lightning_mp.errors import Faults
from lightning_mp.modules.fp8 import is_converted
from lightning_mp.strategies.sharding import Sharding


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


def check(how: Sharding, tensor_parallel: int, faults: Faults) -> None:
    """Note with what else weights cannot be gathered in FP8."""
    again = how.options.get("reshard_after_forward")
    beside = {
        f"tensor_parallel={tensor_parallel}": tensor_parallel > 1,
        "cpu_offload=True": how.cpu_offload,
        f"reshard_after_forward={again!r}": isinstance(again, int) and not isinstance(again, bool),
        "compile=True": how.compile,
    }
    for given in (word for word, holds in beside.items() if holds):
        faults.add(
            f"FP8(all_gather=True) beside {given}",
            "weights gathered in FP8 from shards on the device, eager, over all data-parallel ranks",
            f"leave out all_gather=True, or {given}",
        )


class FP8Gather:
    """Switches between gathering ``modules``' weights in FP8, while the plan trains, and as they are stored.

    The shards stay plain fp32 tensors: what FSDP2 asks for hangs on them as attributes, which no state dict has.
    """

    def __init__(self, root: nn.Module, modules: Iterable[nn.Module], group: Any, *, emulate: bool) -> None:
        weights = {id(module.weight): module for module in modules}
        units = [unit for unit in root.modules() if isinstance(unit, FSDPModule)]
        found = [one for unit in units for one in fsdp2_parameters(unit) if id(one.sharded_param) in weights]
        self._ways = [(GatherWays(one), _InFP8(emulate, one.sharded_param.shape[0])) for one in found]
        self._owners = [weights[id(one.sharded_param)] for one in found]
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
