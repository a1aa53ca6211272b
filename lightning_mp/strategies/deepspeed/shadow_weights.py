"""ZeRO-1 and 2: bf16/fp16 shadow weights where autocast alone computes with them; DeepSpeed's masters stay fp32."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.compat.deepspeed import full_master, loses_averages
from lightning_mp.compat.lightning import trainer_of
from lightning_mp.compat.torch import has_gradient_hooks, is_compiled
from lightning_mp.modules import half_copies, half_weights
from lightning_mp.modules.half_copies import HalfCopy, Run
from lightning_mp.numerics.dtypes import to_torch
from lightning_mp.precision import MixedPrecisionPlan
from lightning_mp.strategies.unfit import AVERAGES

_ADVICE = (
    "deepspeed.utils.safe_get_full_fp32_param(parameter), called on every rank, has the fp32 value, "
    "safe_set_full_fp32_param sets it; make_strategy(..., half_copies=False) holds fp32 weights."
)
#: seconds in which the ranks of a run that failed have to come to its end
PATIENCE = 5.0
_LOST = (
    "The weights hold half-precision values: not all ranks ended soon after the failure, and their parts of the fp32 "
    "weights could not be collected. Go on from a checkpoint."
)
#: hooks of the monitors know what a shadow is
_OURS = "lightning_mp."


class ShadowWeights:
    """The shadow weights of a run: installed before DeepSpeed takes the module, fp32 restored when the run is over."""

    def __init__(self) -> None:
        self.run = Run(_ADVICE)
        self._masters: dict[HalfCopy, Tensor] = {}
        self._hooks: list[Any] = []
        self._zero: Any = None

    def install(self, module: nn.Module, plan: MixedPrecisionPlan, optimizer: Optimizer) -> None:
        """Put shadows in place of the weights that may have one; all ranks begin with the weights of rank 0."""
        dtype = to_torch(plan.policy.compute_dtype)
        weights = _choose(module, plan, optimizer)
        for weight in weights:
            tensor = cast("nn.Parameter", weight.tensor)
            if dist.is_initialized():
                dist.broadcast(tensor.data, 0)
            master = tensor.data
            self._hooks.append(half_copies.hold(tensor, dtype, weight.name, self.run, self._sums_in_fp32(tensor)))
            self._masters[cast("HalfCopy", tensor)] = master
        attention = {id(part.out_proj): part for part in module.modules() if isinstance(part, nn.MultiheadAttention)}
        held: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        for holder, key in (place for weight in weights for place in weight.places):
            held.setdefault(attention.get(id(holder), holder), []).append((holder, key))
        for part, holders in held.items():
            self._hooks += half_copies.stand_in(part, holders, dtype)

    def _sums_in_fp32(self, weight: Tensor) -> Any:
        """DeepSpeed averages some gradients in place, in their own dtype."""
        return lambda: loses_averages(self._zero, weight)

    def connect(self, zero: Any) -> None:
        """DeepSpeed made its masters from the shadows: make them the fp32 weights."""
        self._zero = zero
        self.set_masters({id(weight): master for weight, master in self._masters.items()})
        self._masters = dict.fromkeys(self._masters, torch.empty(0))

    def set_masters(self, values: dict[int, Tensor]) -> None:
        """Set the masters of the shadows to whole fp32 ``values``, by ``id`` of the shadow."""
        import deepspeed

        for weight in self._masters:
            if id(weight) in values:
                deepspeed.utils.safe_set_full_fp32_param(weight, values[id(weight)])

    def restore(self, *, failed: bool) -> None:
        """Make the parameters fp32 again, on the CPU, with the masters of all ranks, each of which calls it.

        After a run that ``failed`` it may be that not all of them do: then they have the half values, and a warning
        says so.
        """
        for hook in self._hooks:
            hook.remove()
        taken = self._zero is not None and bool(self._masters)
        group = _group_after_failure() if failed and taken else None
        if failed and taken and group is None:
            warnings.warn(_LOST, stacklevel=2)
        for weight, master in self._masters.items():
            if not taken:  # DeepSpeed failed to take the module
                half_copies.give_back(weight, master)
            elif failed and group is None:
                half_copies.give_back(weight, weight.data.float())
            else:
                half_copies.give_back(weight, full_master(weight, group))
        if group is not None:
            dist.destroy_process_group(group)
        self._masters, self._hooks, self._zero = {}, [], None


def _group_after_failure() -> Any:
    """A group of all ranks, if all of them come here within ``PATIENCE``: others may wait in a collective for ever.

    A group of its own, for on those of the run it is not known which collectives each rank has begun.
    """
    try:
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE))
    except RuntimeError:
        return None


def _choose(module: nn.Module, plan: Any, optimizer: Optimizer) -> list[half_weights.Weight]:
    """The weights to hold in half precision.

    DeepSpeed takes the first group's first parameter for what the engine computes with: one that is fp32 is left there.
    """
    trainer: Any = trainer_of(module)
    if any(map(is_compiled, module.modules())) or any(isinstance(each, AVERAGES) for each in trainer.callbacks):
        return []  # a compiled forward would not meet the hooks; callbacks that average weights need them in fp32
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    steps_fp32 = [
        weight
        for weight in half_weights.survey(module, plan.engine.pin_map, plan.policy)
        if weight.tensor.dtype == torch.float32 and type(weight.tensor) is nn.Parameter
        if id(weight.tensor) in stepped and not has_gradient_hooks(weight.tensor, but=_OURS)
    ]
    weights = half_weights.copied(steps_fp32, module)
    trained = ([one for one in group["params"] if one.requires_grad] for group in optimizer.param_groups)
    first = next(filter(None, trained), [])
    chosen = {id(weight.tensor) for weight in weights}
    if chosen and all(id(parameter) in chosen for parameter in first):
        smallest = min(first, key=lambda parameter: parameter.numel(), default=None)
        weights = [weight for weight in weights if weight.tensor is not smallest]
    return weights
