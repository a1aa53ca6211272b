"""What the operands of FP8 products lose: noted on the device while they are made, and read when someone asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mp.compat import torchao
from lightning_mp.numerics.grads import local

#: the operands of a layer's products, in the order in which they are noted
ROLES = ("input", "weight", "gradient")
_INPUT, _WEIGHT, _GRADIENT = range(3)
#: what is noted of each: values flushed to zero, values that were not 0, largest magnitude, smallest scale, how often
_FLUSHED, _VALUES, _AMAX, _SCALE, _TIMES = range(5)
#: of more values, evenly spaced rows of about so many are looked at
_SAMPLE = 2**17
#: what a module has them as
SEEN = "_lmp_fp8_seen"


class Seen(NamedTuple):
    """Where one layer notes its operands, and the numbers that are noted: tensors of its own, which nothing aliases.

    ``forward``, (2, 4), is written to. ``gradient``, (5,), is a leaf whose gradient the numbers are: what a backward
    pass writes into, a compiled forward could not hand to it. They are summed, so that the last is how often.
    """

    forward: Tensor
    gradient: Tensor


class Watch:
    """Whether and where converted layers note what becomes of their operands; one for a run, shared by its layers."""

    def __init__(self, recipe: str) -> None:
        self.recipe = recipe
        #: whether the step at hand is watched
        self.on = False
        self._seen: dict[str, Seen] = {}

    def begin(self, layers: Mapping[str, nn.Module], device: torch.device) -> None:
        """A step begins that is to be watched; ``layers`` are the converted ones by name, and stay the same."""
        for name, module in layers.items() if not self._seen else ():
            made = torch.empty(2, 4, device=device), torch.zeros(5, device=device, requires_grad=True)
            self._seen[name] = Seen(*made)
            object.__setattr__(module, SEEN, self._seen[name])
        for seen in self._seen.values():
            seen.forward.zero_()
            seen.forward[:, _SCALE] = torch.inf
            seen.gradient.grad = None
        self.on = True

    def end(self) -> Tensor:
        """The step is over: what was noted, over all ranks; fp32, (layers x roles, 4), on the device."""
        self.on = False
        forward = torch.stack([seen.forward for seen in self._seen.values()])
        none = torch.zeros_like(forward[0, 0, :1]).expand(5)
        gradient = torch.stack(
            [none if seen.gradient.grad is None else seen.gradient.grad for seen in self._seen.values()]
        )
        means = gradient[:, _AMAX:_TIMES] / gradient[:, _TIMES:]  # of its micro-batches
        table = torch.cat((forward, torch.cat((gradient[:, :_AMAX], means), 1)[:, None]), 1)
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

    def note(self, rows: Tensor, weight: Tensor, seen: Seen) -> None:
        """Note what a layer is about to multiply: rows (tokens, in) and its weight (out, in)."""
        torch.ops.lightning_mp.note_fp8(local(rows.detach()), seen.forward, self.recipe, _INPUT)
        if torchao.holds_fp8(weight):
            _note_held(weight, seen.forward[_WEIGHT])
        else:
            torch.ops.lightning_mp.note_fp8(local(weight.detach()), seen.forward, self.recipe, _WEIGHT)

    def note_gradient(self, output: Tensor, seen: Seen) -> Tensor:
        """``output``, whose gradient will be noted."""
        return cast("Any", _Noted).apply(output, seen.gradient, self.recipe)


@torch.compiler.allow_in_graph
class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, probe: Tensor, recipe: str) -> Tensor:
        ctx.recipe = recipe
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], torch.ops.lightning_mp.look_at_fp8(local(gradients[0]), ctx.recipe, _GRADIENT), None


# Operators of their own, so that torch.compile leaves them whole, and checkpointing and the audit see no products.
@torch.library.custom_op("lightning_mp::look_at_fp8", mutates_args=())
def _look(values: Tensor, recipe: str, role: int) -> Tensor:
    rows = values.reshape(-1, values.shape[-1])
    if not rows.numel():
        nothing = values.new_zeros(5, dtype=torch.float32)
        nothing[_SCALE] = torch.inf
        return nothing
    with torch.no_grad():
        scale, as_fp8 = torchao.scaling(rows, recipe, ROLES[role])
        step = max(1, rows.numel() // _SAMPLE)
        some = rows[::step]
        rounded = as_fp8(some.float() * (scale[::step] if scale.dim() else scale))
        flushed, there = (rounded.float() == 0) & (some != 0), some != 0
        numbers = (flushed.sum(), there.sum(), rows.abs().amax(), scale.amin(), torch.ones_like(scale.amin()))
        return torch.stack([number.float() for number in numbers])


@_look.register_fake
def _(values: Tensor, recipe: str, role: int) -> Tensor:
    return values.new_empty(5, dtype=torch.float32)


@torch.library.custom_op("lightning_mp::note_fp8", mutates_args=("seen",))
def _note(values: Tensor, seen: Tensor, recipe: str, role: int) -> None:
    _add(seen[role], _look(values, recipe, role))


@_note.register_fake
def _(values: Tensor, seen: Tensor, recipe: str, role: int) -> None: ...


@torch.no_grad()
def _note_held(weight: Tensor, seen: Tensor) -> None:
    """Of a weight that was gathered in FP8 its zeros are what was flushed: a trained weight is hardly ever 0."""
    data, scale = torchao.held(weight)
    numbers = data.float()
    size = torch.full_like(scale, float(numbers.numel()))
    _add(seen, torch.stack([(numbers == 0).sum().float(), size, numbers.abs().amax() / scale, scale]))


def _add(seen: Tensor, numbers: Tensor) -> None:
    seen[:_AMAX] += numbers[:_AMAX]
    seen[_AMAX] = torch.maximum(seen[_AMAX], numbers[_AMAX])
    seen[_SCALE] = torch.minimum(seen[_SCALE], numbers[_SCALE])
