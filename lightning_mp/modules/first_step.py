"""What the first step of a run is refused for: weights that are computed with past their pin, or past autocast's cast.

Operators are seen below autocast, so that every function counts. Compiled graphs are not looked into.
"""

import re
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_mp.compat.torch import (
    OpOverload,
    TorchDispatchMode,
    calling_frame,
    in_backward,
    outside_of_dispatch_modes,
)
from lightning_mp.errors import PlanError
from lightning_mp.modules.half_weights import multiplies, other_use, reads_no_value, users_line
from lightning_mp.modules.patterns import has_own_forward
from lightning_mp.modules.pins import PinnedModule, in_pinned_forward, is_pinned
from lightning_mp.numerics.dtypes import HALF, dtype_name, floating_in, to_torch

#: set on what comes from a pinned weight: where it comes from; and on what it was cast to: that, and in which call
_SOURCE, _CAST = "lmp_pin_source", "lmp_pin_cast"
#: set on views of a weight that is gathered in half precision, to its name
_PART_OF = "lmp_part_of"
#: what has the same values in another place
_COPIES = frozenset(("clone", "_to_copy", "_unsafe_view", "cat", "stack", "repeat"))
_CLASH = re.compile("dtype|scalar ?type|same type|should be the same", re.IGNORECASE)


class _Source(NamedTuple):
    member: PinnedModule
    #: the name of the weight in it
    key: str
    #: it is the weight, or a view or copy of it, and not what was computed with it
    whole: bool


class FirstStep(TorchDispatchMode):
    """Around the forward pass of a first step: follows weights through the operators, as autocast hands them on.

    ``halves`` names fp32 weights that hold values of ``compute``, by id.

    Raises:
        PlanError: a pinned weight runs in another dtype outside of its module, a pin is why two dtypes clash, or
            something needs the fp32 values of one of ``halves``.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have dynamo compile as if this mode were not there."""
        return True

    def __init__(
        self, root: nn.Module, members: Sequence[PinnedModule], compute: str, halves: Mapping[int, str]
    ) -> None:
        super().__init__()
        self._root, self._members, self._compute, self._half_values = root, members, compute, halves
        #: by ``id`` of every parameter that was met; those of sharded modules are made in their forward
        self._known: dict[int, _Source | None] = {}
        #: those parameters, so that no other one gets their ``id``
        self._met: dict[int, nn.Parameter] = {}
        self._calls = _Calls()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, with a look at what it is given and what comes out."""
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or in_backward():
            return func(*args, **kwargs)
        self._calls.forget_finished()
        given, name = floating_in([args, kwargs]), func.overloadpacket.__name__
        sources = {id(tensor): source for tensor in given if (source := self._source(tensor)) is not None}
        moves = func.is_view or name in _COPIES
        if not moves:
            self._refuse_past_pin(given, name)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            self._explain_clash(error, given, sources, name)
            raise
        made = floating_in(result)
        if self._half_values:
            self._allow_cast_alone(func, name, given, made, kwargs)
        if moves:
            self._follow_cast(given, made, name)
        if sources:
            self._follow(given, sources, made, moves=moves)
        return result

    def _allow_cast_alone(
        self, func: OpOverload, name: str, given: list[Tensor], made: list[Tensor], kwargs: Mapping[str, Any]
    ) -> None:
        dtype = to_torch(self._compute)
        for tensor in given:
            weight = self._half_values.get(id(tensor)) or getattr(tensor, _PART_OF, None)
            if weight is not None and func.is_view:
                for view in made:
                    setattr(view, _PART_OF, weight)
            elif weight is not None and not reads_no_value(name) and (name, kwargs.get("dtype")) != ("_to_copy", dtype):
                raise other_use(weight, dtype, func)

    def _source(self, tensor: Tensor) -> _Source | None:
        if not isinstance(tensor, nn.Parameter):
            return getattr(tensor, _SOURCE, None)
        if id(tensor) not in self._known:
            met = {id(parameter): parameter for parameter in (tensor, *self._root.parameters())}
            self._met |= met
            self._known.update(dict.fromkeys(met))
            for member in self._members:
                own = member.module.named_parameters(recurse=False)
                self._known.update((id(parameter), _Source(member, key, True)) for key, parameter in own)
        return self._known[id(tensor)]

    def _follow(self, given: list[Tensor], sources: dict[int, _Source], made: list[Tensor], *, moves: bool) -> None:
        """Note of what was made that it comes from a pinned weight, where it has its dtype from there."""
        source, inside = next(iter(sources.values())), in_pinned_forward()
        weights = (sources[id(one)].whole if id(one) in sources else isinstance(one, nn.Parameter) for one in given)
        whole = moves and not inside and all(weights)
        for tensor in made:
            alike = (other for other in given if other.dtype == tensor.dtype)
            own = tensor.dtype == to_torch(source.member.pin.dtype) and self._source(tensor) is None
            if own and (inside or whole or all(id(other) in sources for other in alike)):
                setattr(tensor, _SOURCE, source._replace(whole=whole))

    def _follow_cast(self, given: list[Tensor], made: list[Tensor], name: str) -> None:
        """Note a cast of a weight to a half format, and in which call of a function it was made."""
        cast = next((noted for tensor in given if (noted := getattr(tensor, _CAST, None)) is not None), None)
        source = self._source(given[0]) if given and name == "_to_copy" else None
        if source is not None and source.whole and not in_pinned_forward() and source.member.pin.dtype != self._compute:
            cast = source, self._calls.current()
        if cast is None:
            return
        for tensor in made:
            if tensor.dtype in HALF and tensor.dtype != to_torch(cast[0].member.pin.dtype):
                setattr(tensor, _CAST, cast)

    def _refuse_past_pin(self, given: list[Tensor], name: str) -> None:
        """Raise where a weight is computed with in the call that cast it: what users cast themselves they mean."""
        for tensor in given:
            source, call = getattr(tensor, _CAST, (None, None))
            if source is None or call != self._calls.current() or _in_pinned_call():
                continue
            # a table of learned queries may be what is multiplied, and is cast as any activation is
            factors = [other for other in given if other.ndim > 1]
            if multiplies(source.member.module) or not factors or factors[0] is not tensor:
                raise _past_pin(source, f"in {dtype_name(tensor.dtype)}", name)

    def _explain_clash(self, error: RuntimeError, given: list[Tensor], sources: dict[int, _Source], name: str) -> None:
        """Raise where a pin is why two dtypes do not go together."""
        known = ((tensor, sources[id(tensor)]) for tensor in given if id(tensor) in sources)
        pinned = [source for tensor, source in known if tensor.dtype == to_torch(source.member.pin.dtype)]
        dtypes = [dtype_name(tensor.dtype) for tensor in given]
        if not pinned or len(set(dtypes)) == 1 or not _CLASH.search(str(error)):
            return
        member, pin = pinned[0].member, pinned[0].member.pin
        other = next(word for word in dtypes if word != pin.dtype)
        if pinned[0].whole:
            raise _past_pin(pinned[0], f"together with {other}", name) from error
        given_to = f"and what it gives meets {other} in {name}{users_line()}"
        raise PlanError.of(
            f"{member.name!r} is pinned to {pin.dtype} ({pin.pattern!r}), {given_to}",
            "cast it there, pin what reads it too, or remove the pin",
        ) from error


def _past_pin(source: _Source, how: str, name: str) -> PlanError:
    member = source.member
    call = f"call {member.name!r} there, " if has_own_forward(member.module) else ""  # a ParameterDict has none
    return PlanError.of(
        f"{member.name}.{source.key} is pinned to {member.pin.dtype} ({member.pin.pattern!r}), and something "
        f"outside of that module's forward computes with it {how} ({name}{users_line()})",
        f"{call}pin the module around it, compute there with autocast off, or remove the pin",
    )


class _Calls:
    """Tells calls of Python functions apart. The ``id`` of a frame does not: the next call may get the same one.

    A frame is held while its call runs, so that no other frame has its ``id``. Finished ones are let go of with the
    next operator, because a frame holds the activations among its variables.
    """

    def __init__(self) -> None:
        #: the frames in which a weight was cast, by a number of their own
        self._frames: dict[int, FrameType] = {}
        self._count = 0

    def current(self) -> tuple[int, int] | None:
        """Return a number of the call in which the operator at hand is called, and where in its code; or None."""
        frame = outside_of_dispatch_modes(calling_frame(__file__))
        if frame is None:
            return None
        number = next((number for number, other in self._frames.items() if other is frame), None)
        if number is None:
            self._count += 1
            number = self._count
            self._frames[number] = frame
        return number, frame.f_lasti

    def forget_finished(self) -> None:
        """Let go of the frames of calls that are over."""
        if not self._frames:
            return
        running = set[int]()
        frame = calling_frame(__file__)
        while frame is not None:
            running.add(id(frame))
            frame = frame.f_back
        self._frames = {number: frame for number, frame in self._frames.items() if id(frame) in running}


def _in_pinned_call() -> bool:
    """Whether a pinned module is being called, as in its own hooks (``spectral_norm``, ``weight_norm``)."""
    frame = calling_frame(__file__)
    while frame is not None:
        own = frame.f_locals.get("self")
        if isinstance(own, nn.Module) and is_pinned(own):
            return True
        frame = frame.f_back
    return False
