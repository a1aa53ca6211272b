"""What the operands of FP8 products lose: noted on the device in the backward pass, and read when someone asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mp.compat import torchao
from lightning_mp.numerics.grads import local

#: the operands of a layer's products, in the order in which they are noted
ROLES = ("input", "weight", "gradient")
#: what is noted of each: values flushed to zero, values that were not 0, largest magnitude, smallest scale, how often
_FLUSHED, _VALUES, _AMAX, _SCALE, _TIMES = range(5)
#: of more values, evenly spaced rows of about so many are looked at
_SAMPLE = 2**17
#: what a module has them as
SEEN = "_lmp_fp8_seen"


class Watch:
    """Whether and where converted layers note what becomes of their operands; one for a run, shared by its layers."""

    def __init__(self, recipe: str) -> None:
        self.recipe = recipe
        #: whether the step at hand is watched
        self.on = False
        #: by layer a leaf, (roles, 5), whose gradient the numbers are, summed over passes: checkpointing could not keep
        #: what a forward writes into, and a compiled forward could not hand on what a backward writes into
        self._seen: dict[str, Tensor] = {}

    def begin(self, layers: Mapping[str, nn.Module], device: torch.device) -> None:
        """A step begins that is to be watched; ``layers`` are the converted ones by name, and stay the same."""
        for name, module in layers.items() if not self._seen else ():
            self._seen[name] = torch.zeros(len(ROLES), 5, device=device, requires_grad=True)
            object.__setattr__(module, SEEN, self._seen[name])
        for seen in self._seen.values():
            seen.grad = None
        self.on = True

    def end(self) -> Tensor:
        """The step is over: what was noted, over all ranks; fp32, (layers x roles, 4), on the device."""
        self.on = False
        seen = torch.stack([torch.zeros_like(one) if one.grad is None else one.grad for one in self._seen.values()])
        means = seen[..., _AMAX:_TIMES] / seen[..., _TIMES:]  # of its micro-batches
        table = torch.cat((seen[..., :_AMAX], means), -1)
        if dist.is_initialized() and dist.get_world_size() > 1:
            counts = table[..., :_AMAX].contiguous()
            extremes = torch.stack((table[..., _AMAX], -table[..., _SCALE]), -1).nan_to_num(-torch.inf)
            dist.all_reduce(counts)
            dist.all_reduce(extremes, dist.ReduceOp.MAX)
            table = torch.cat((counts, extremes[..., :1], -extremes[..., 1:]), -1)
        return table.flatten(0, 1)

    def operands(self, rows: Sequence[Sequence[float]]) -> dict[tuple[str, str], tuple[float, float, float]]:
        """The numbers of ``end`` as read, by layer and role; what held nothing but zeros is left out.

        The share of values, of those that are not 0, that were flushed to 0; the largest magnitude; its scale, of a
        recipe with a scale a row the smallest.
        """
        places = ((name, role) for name in self._seen for role in ROLES)
        return {
            place: (row[_FLUSHED] / row[_VALUES], row[_AMAX], row[_SCALE])
            for place, row in zip(places, rows, strict=True)
            if row[_VALUES]
        }

    def note(self, output: Tensor, rows: Tensor, weight: Tensor, seen: Tensor) -> Tensor:
        """``output``, whose backward pass notes the operands: rows (tokens, in), the weight (out, in), its gradient."""
        held = torchao.holds_fp8(weight)
        of_weight = _of_held(weight) if held else _look_at(weight, self.recipe, "weight")
        of_input = _look_at(rows, self.recipe, "input")
        return cast("Any", _Noted).apply(output, seen, of_input, of_weight, self.recipe)


@torch.compiler.allow_in_graph
class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, seen: Tensor, of_input: Tensor, of_weight: Tensor, recipe: str) -> Tensor:
        ctx.recipe = recipe
        ctx.save_for_backward(of_input, of_weight)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        of_gradient = _look_at(gradients[0], ctx.recipe, "gradient")
        return gradients[0], torch.stack((*ctx.saved_tensors, of_gradient)), None, None, None


def _look_at(values: Tensor, recipe: str, role: str) -> Tensor:
    return torch.ops.lightning_mp.look_at_fp8(local(values.detach()), recipe, role)


# An operator of its own, so that torch.compile leaves it whole, and checkpointing and the audit see no products.
@torch.library.custom_op("lightning_mp::look_at_fp8", mutates_args=())
def _look(values: Tensor, recipe: str, role: str) -> Tensor:
    rows = values.reshape(-1, values.shape[-1])
    if not rows.numel():
        return values.new_zeros(5, dtype=torch.float32)
    with torch.no_grad():
        scale, as_fp8 = torchao.scaling(rows, recipe, role)
        step = max(1, rows.numel() // _SAMPLE)
        some = rows[::step]
        rounded = as_fp8(some.float() * (scale[::step] if scale.dim() else scale))
        flushed, there = (rounded.float() == 0) & (some != 0), some != 0
        numbers = (flushed.sum(), there.sum(), rows.abs().amax(), scale.amin(), torch.ones_like(scale.amin()))
        return torch.stack([number.float() for number in numbers])


@_look.register_fake
def _(values: Tensor, recipe: str, role: str) -> Tensor:
    return values.new_empty(5, dtype=torch.float32)


@torch.no_grad()
def _of_held(weight: Tensor) -> Tensor:
    """Of a weight that was gathered in FP8 its zeros are what was flushed: a trained weight is hardly ever 0."""
    data, scale = torchao.held(weight)
    numbers = data.float()
    size, once = torch.full_like(scale, float(numbers.numel())), torch.ones_like(scale)
    return torch.stack([(numbers == 0).sum().float(), size, numbers.abs().amax() / scale, scale, once])
