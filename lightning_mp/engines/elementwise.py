"""Whether an optimizer may be given pieces of parameters: found out by letting copies of it step some."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_mp.compat.torch import TorchDispatchMode, without_step_hooks
from lightning_mp.engines.optimizer_facts import takes_closure
from lightning_mp.numerics.dtypes import HALF
from lightning_mp.numerics.grads import parameters_of

#: torch's that treat every number by itself
_ELEMENTWISE = frozenset[type[Optimizer]](
    (
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    )
)
_SHAPE, _STEPS, _RATE = (8, 16), 2, 1e-2
#: where a flat parameter is cut, neither at a row's end nor in its middle
_CUT = 53
#: of the largest update; the pieces of an elementwise optimizer differ in the last bits
_WITHIN = 1e-3
#: the same where the step itself computes in half precision, as Muon does: a sum in another order is this far off
_WITHIN_HALF = 1e-1

#: how many numbers torchao's optimizers begin to quantize at
_QUANTIZED = 4096

#: what is allowed where an optimizer gets pieces, and what to do
INSTEAD = (
    "an optimizer that updates each number by itself (AdamW, SGD, Lion)",
    "use one of these, or strategy='mp_ddp'",
)

#: a tensor → the parts of it that optimizers step, each its own
Split = Callable[[Tensor], Sequence[Tensor]]


def fault_on_flat_pieces(optimizer: Optimizer, *, closure: bool = True) -> str | None:
    """Why ``optimizer`` cannot step on flat pieces of its parameters; ``None`` where it can, or cannot be tried.

    ``closure``: it is given one, if it takes one.
    """
    why = _tried(optimizer, lambda whole: whole.reshape(-1).tensor_split([_CUT]), closure)
    return _made_of_a_subclass(optimizer, closure) if why is None else why


def fault_on_dtensors(optimizer: Optimizer) -> str | None:
    """The same on the DTensors that FSDP2 makes of its parameters; every rank calls it."""
    example = next((p for p in parameters_of(optimizer) if isinstance(p, DTensor)), None)
    if example is None:
        return None
    mesh, placements = example.device_mesh, example.placements
    return _tried(optimizer, lambda whole: [distribute_tensor(whole, mesh, placements)])


def fault_on_a_part(optimizer: Optimizer) -> str | None:
    """Why it cannot step some of its parameters without the others; ``None`` where it can, or cannot be tried."""
    if type(optimizer) in _ELEMENTWISE:
        return None
    start, *slopes = _numbers(optimizer)
    try:
        *_, alone = _stepped(optimizer, start, slopes, closure=False)
        *_, beside = _stepped(optimizer, start, slopes, closure=False, beside=True)
    except Exception:  # it needs more than a gradient: nothing can be said
        return None
    within = _WITHIN * (alone[0] - start).abs().max()
    return None if (beside[0] - alone[0]).abs().max() <= within else "whose step of one parameter depends on the others"


def steps_alone(optimizer: Optimizer) -> bool:
    """Whether it steps without a closure, and without an optimizer inside of it that holds the weights."""
    if any(isinstance(inner, Optimizer) for inner in vars(optimizer).values()):
        return False
    start, *slopes = _numbers(optimizer)
    try:
        *_, end = _stepped(optimizer, start, slopes, closure=False)
    except Exception:  # whatever it needs, a gradient is not all
        return False
    return not torch.equal(end[0], start)


def _tried(optimizer: Optimizer, split: Split, closure: bool = True) -> str | None:
    """Let copies step on a small parameter as a whole, and on each of its pieces."""
    if type(optimizer) in _ELEMENTWISE:
        return None
    start, *slopes = _numbers(optimizer)
    halves = _Halves()
    try:
        with halves:
            whole = _stepped(optimizer, start, slopes, closure)
    except Exception:  # it needs more than a gradient: nothing can be said
        return None
    try:
        parts = zip(split(start), *map(split, slopes), strict=True)
        pieces = [_stepped(optimizer, piece, of_slopes, closure) for piece, *of_slopes in parts]
    except Exception as error:
        return f"which fails on them: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    within = _WITHIN_HALF if halves.seen else _WITHIN
    return None if _alike(whole, pieces, start, within) else "whose step depends on the parameter as a whole"


def _made_of_a_subclass(optimizer: Optimizer, closure: bool) -> str | None:
    """Whether state is kept in tensors that cannot be cut and joined: torchao's, which are quantized in blocks."""
    if type(optimizer) in _ELEMENTWISE:
        return None
    many = torch.ones(_QUANTIZED, device=_device(optimizer))
    made: dict[int, Any] = {}
    try:
        _stepped(optimizer, many, [many], closure, made)
    except Exception:
        return None
    states = [state for states in made.values() if isinstance(states, defaultdict) for state in states.values()]
    kinds = [type(value) for state in states for value in state.values() if hasattr(value, "__tensor_flatten__")]
    return f"whose state, {kinds[0].__name__}, can be neither cut nor joined as flat tensors are" if kinds else None


def _alike(whole: list[list[Tensor]], pieces: list[list[list[Tensor]]], start: Tensor, within: float) -> bool:
    """Whether the pieces were, whenever gradients were asked for and at the end, where the whole parameter was."""
    if any(len(piece) != len(whole) for piece in pieces):
        return False
    for wanted, *seen in zip(whole, *pieces, strict=True):
        for there, *parts in zip(wanted, *seen, strict=True):
            found = torch.cat([_full(part).reshape(-1) for part in parts]).reshape(_SHAPE)
            if (found - there).abs().max() > within * (there - start).abs().max().clamp(min=1e-12):
                return False
    return True


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _numbers(optimizer: Optimizer) -> list[Tensor]:
    """What a parameter begins with, and its gradients."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(_SHAPE, generator=generator).to(_device(optimizer)) for _ in range(1 + _STEPS)]


def _device(optimizer: Optimizer) -> torch.device:
    return next((p.device for p in parameters_of(optimizer)), torch.device("cpu"))


def _stepped(
    optimizer: Optimizer,
    start: Tensor,
    slopes: Sequence[Tensor],
    closure: bool,
    made: dict[int, Any] | None = None,
    *,
    beside: bool = False,
) -> list[list[Tensor]]:
    """Where a copy's parameters were, one a group, whenever it asked for gradients and after a step for each slope.

    ``beside``: a further one in the first group has far larger gradients.
    """
    alike = _copy(optimizer, start, {} if made is None else made)
    other = [nn.Parameter(start.clone())] if beside else []
    alike.param_groups[0]["params"].extend(other)
    parameters = parameters_of(alike)
    points: list[list[Tensor]] = []

    def ask(slope: Tensor) -> Tensor:
        points.append([parameter.detach().clone() for parameter in parameters])
        for parameter in parameters:
            parameter.grad = slope.clone() * (1e3 if any(parameter is one for one in other) else 1)
        return start.new_zeros(())

    with torch.random.fork_rng([start.device] if start.is_cuda else []), torch.compiler.set_stance("force_eager"):
        for slope in slopes:
            ask(slope)
            if closure and takes_closure(optimizer):
                alike.step(partial(ask, slope))
            else:
                alike.step()
    return [*points, [parameter.detach() for parameter in parameters]]


def _copy(optimizer: Any, start: Tensor, made: dict[int, Any]) -> Any:
    """An optimizer without state, with a parameter a group, and so the optimizers inside; what they share, they share.

    ``made``: by what it stands for.
    """
    alike = without_step_hooks(optimizer)
    own = vars(alike)
    own.pop("step", None)  # a scheduler has put a method of the original there
    for name, value in [*own.items()]:
        if name == "state":
            own[name] = made.setdefault(id(value), defaultdict(dict))
        elif name == "param_groups":
            groups = [made.setdefault(id(group), _group(group, start)) for group in value]
            own[name] = made.setdefault(id(value), groups)
        elif isinstance(value, Optimizer):
            own[name] = _copy(value, start, made)
    return alike


def _group(group: dict[str, Any], start: Tensor) -> dict[str, Any]:
    """The same options, and a rate that moves something: a warm-up may begin at 0."""
    rate = group.get("lr")
    again = {"lr": rate.new_full((), _RATE) if isinstance(rate, Tensor) else _RATE} if rate is not None else {}
    return {**group, **again, "params": [nn.Parameter(start.clone())]}


class _Halves(TorchDispatchMode):
    """Whether anything was computed in half precision."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen |= isinstance(result, Tensor) and result.dtype in HALF
        return result
