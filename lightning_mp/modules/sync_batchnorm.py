"""Batch norms that take their statistics over all processes, by class swap: names, pins and hooks stay."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from lightning_mp.compat.torch import BATCH_NORM
from lightning_mp.errors import Faults
from lightning_mp.modules.patterns import Swapped, named_submodules, original_class, swap_all


class SyncedForward(Swapped):
    """Normalizes by the mean and variance of the whole batch, that of every process together, in training."""

    lmp_state = ("_lmp_synced",)
    _lmp_synced: bool
    # What torch's forward of SyncBatchNorm asks its module for, besides what every batch norm has.
    process_group: Any = None

    def _check_non_zero_input_channels(self, input: Tensor) -> None:
        return

    def forward(self, input: Tensor) -> Tensor:
        """As the module's own forward would on the whole batch."""
        module = cast("Any", self)
        # One device under mp_ddp has no process group.
        several = dist.is_initialized() and dist.get_world_size() > 1
        if not (self.__dict__.get("_lmp_synced") and module.training and several):
            return cast("Any", super()).forward(input)
        # torch's kernels take no tensors of a CPU
        return _normalize(module, input) if input.device.type == "cpu" else nn.SyncBatchNorm.forward(module, input)


def _normalize(module: Any, given: Tensor) -> Tensor:
    """What torch's ``SyncBatchNorm`` computes, of operators that a CPU has; ``given`` is (N, C, ...)."""
    x = given.to(torch.promote_types(given.dtype, torch.float32))
    over = [dimension for dimension in range(x.dim()) if dimension != 1]
    shape = [-1 if dimension == 1 else 1 for dimension in range(x.dim())]
    ones = x.new_full((1,), x.numel() / x.size(1))
    total = all_reduce(torch.cat([x.sum(over), ones]), group=module.process_group or dist.group.WORLD)
    count = total[-1].detach()
    mean = total[:-1] / count
    centred = x - mean.view(shape)
    variance = all_reduce(centred.square().sum(over), group=module.process_group or dist.group.WORLD) / count
    if module.track_running_stats:
        module.num_batches_tracked.add_(1)
        momentum = 1.0 / module.num_batches_tracked if module.momentum is None else module.momentum
        unbiased = variance.detach() * count / (count - 1)
        for running, new in ((module.running_mean, mean.detach()), (module.running_var, unbiased)):
            running.copy_(running + momentum * (new - running))
    output = centred * (variance + module.eps).rsqrt().view(shape)
    if module.weight is not None:
        output = output * module.weight.view(shape)
    if module.bias is not None:
        output = output + module.bias.view(shape)
    return output.to(given.dtype)


def select(root: nn.Module, faults: Faults) -> list[nn.Module]:
    """The batch norms below ``root``; those whose class does more in its forward than normalize are noted."""
    norms = {module: name for name, module in named_submodules(root) if isinstance(module, BATCH_NORM)}
    for module, name in norms.items():
        own = original_class(module)
        if own.forward not in (nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward):
            given = f"sync_batchnorm=True with {name!r}, a {own.__name__}, whose forward does more than normalize"
            faults.add(given, fix="synchronize it in the module (timm: timm.layers.convert_sync_batchnorm), without it")
    return list(norms)


def apply(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Synchronize ``modules``, in place, and return what undoes it."""
    return swap_all(modules, SyncedForward, innermost=True, _lmp_synced=True)
