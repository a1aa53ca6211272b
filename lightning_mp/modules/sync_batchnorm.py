"""Batch norms with statistics over all processes, by class swap: names, pins and hooks stay."""

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
    """Mix-in of a batch norm that, in training, normalizes by the statistics of all processes' batches."""

    lmp_state = ("_lmp_synced",)
    _lmp_synced: bool
    # torch's SyncBatchNorm.forward reads these two, which other batch norms lack
    process_group: Any = None

    def _check_non_zero_input_channels(self, input: Tensor) -> None:
        return

    def forward(self, input: Tensor) -> Tensor:
        """Return the output that the module's own forward has for the whole batch of all processes.

        In training with several processes this is a collective: every rank must call it, and run
        its backward. In other cases the module's own forward runs.
        """
        module = cast("Any", self)
        # mp_ddp on one device has no process group
        several = dist.is_initialized() and dist.get_world_size() > 1
        if not (self.__dict__.get("_lmp_synced") and module.training and several):
            return cast("Any", super()).forward(input)
        # torch's SyncBatchNorm refuses tensors on a CPU
        return _normalize(module, input) if input.device.type == "cpu" else nn.SyncBatchNorm.forward(module, input)


def _normalize(module: Any, given: Tensor) -> Tensor:
    """Return the result of torch's ``SyncBatchNorm`` for ``given`` (N, C, ...), by operators of a CPU.

    Running statistics are updated. A collective: it all-reduces twice, and twice in the backward.
    """
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
    """Return the batch norms below ``root``.

    A fault is added for each whose class has a forward of its own, because it may do more than
    normalize.
    """
    norms = {module: name for name, module in named_submodules(root) if isinstance(module, BATCH_NORM)}
    for module, name in norms.items():
        own = original_class(module)
        if own.forward not in (nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward):
            given = f"sync_batchnorm=True with {name!r}, a {own.__name__}, whose forward does more than normalize"
            faults.add(given, fix="synchronize it in the module (timm: timm.layers.convert_sync_batchnorm), without it")
    return list(norms)


def apply(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Synchronize ``modules`` in place, and return a function that undoes it."""
    return swap_all(modules, SyncedForward, innermost=True, _lmp_synced=True)
