"""What DistributedDataParallel sums across ranks: gradients in the policy's ``reduce_dtype``, the flag as a maximum."""

# No postponed annotations here: DDP checks those of a communication hook, and refuses strings.

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_mp.compat import torch_sharding as sharding_compat
from lightning_mp.numerics.dtypes import to_torch


def max_over_ranks_(flag: Tensor) -> None:
    """Replace ``flag`` by its maximum over all ranks."""
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)


@dataclass(frozen=True, slots=True)
class _ReduceIn:
    """The communication hook's state: the dtype to sum in."""

    dtype: torch.dtype


def _average_in(state: _ReduceIn, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket in ``state.dtype`` and hand it back in its own."""
    buffer = bucket.buffer()
    # A complex or float64 bucket keeps its dtype; ``to`` makes no copy where none is needed.
    wire = buffer if buffer.is_complex() or buffer.dtype == torch.float64 else buffer.to(state.dtype)
    work: Any = dist.all_reduce(wire.div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))


def needs_hook(module: nn.Module, reduce_dtype: str) -> bool:
    """Whether DDP, which sums each gradient in its own dtype, would sum some in another than ``reduce_dtype``."""
    as_they_are = (to_torch(reduce_dtype), torch.float64)
    return any(p.requires_grad and p.is_floating_point() and p.dtype not in as_they_are for p in module.parameters())


def reduce_in(model: DistributedDataParallel, reduce_dtype: str) -> None:
    """Make DDP sum gradients in ``reduce_dtype``, whatever their own dtype."""
    model.register_comm_hook(_ReduceIn(to_torch(reduce_dtype)), _average_in)


def sum_anew(model: DistributedDataParallel, reduce_dtype: str) -> None:
    """Have DDP sum the gradients of what is trained now: it notes the parameters when it is made, or unpickled."""
    model.__setstate__(model.__getstate__())
    if not sharding_compat.register_comm_hooks(model) and needs_hook(model, reduce_dtype):
        reduce_in(model, reduce_dtype)


def is_nonfinite(loss: Tensor | None, distributed: bool) -> bool:
    """Whether the loss, before it was scaled, is not finite on some rank; a device sync."""
    if loss is None:
        return False
    bad = (~torch.isfinite(loss)).any().float()
    if distributed:
        max_over_ranks_(bad)
    return bool(bad.item())
