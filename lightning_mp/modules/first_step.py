"""Checks in the first step: a weight is used only in the dtype that its pin, or autocast, gives it.

The checks see each operator after autocast has cast its inputs. Compiled graphs are not checked.
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

#: attributes of a tensor: the pinned weight behind it; the weight it was cast from, and the call
_SOURCE, _CAST = "lmp_pin_source", "lmp_pin_cast"
#: attribute of views of a weight that is gathered in half precision: the weight's name
_PART_OF = "lmp_part_of"
#: operators whose result has the values of their inputs
_COPIES = frozenset(("clone", "_to_copy", "_unsafe_view", "cat", "stack", "repeat"))
_CLASH = re.compile("dtype|scalar ?type|same type|should be the same", re.IGNORECASE)


class _Source(NamedTuple):
    member: PinnedModule
    #: the name of the weight in it
    key: str
    #: True for the weight, its views and copies; False for results computed with it
    whole: bool


class FirstStep(TorchDispatchMode):
    """A dispatch mode around the forward pass of a first step, which follows weights through operators.

    ``compute`` is autocast's dtype. ``halves`` maps the ``id`` of an fp32 weight to its name, if
    the weight's values are of ``compute``.

    Raises:
        PlanError: a pinned weight is used in another dtype outside of its module, an operator fails
            because of a pin's dtype, or an operator needs the fp32 values of one of ``halves``.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: dynamo compiles as if this mode were not active."""
        return True

    def __init__(
        self, root: nn.Module, members: Sequence[PinnedModule], compute: str, halves: Mapping[int, str]
    ) -> None:
        super().__init__()
        self._root, self._members, self._compute, self._half_values = root, members, compute, halves
        #: by ``id`` of each parameter met; sharded modules create parameters in their forward
        self._known: dict[int, _Source | None] = {}
        #: those parameters, held so that no other one gets their ``id``
        self._met: dict[int, nn.Parameter] = {}
        self._calls = _Calls()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the operator's result, after checks of its inputs and its result.

        Operators in a backward pass, and higher-order operators, are not checked.
        """
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
        """Raise PlanError if an operator reads a weight of ``halves``, except by a cast to autocast's dtype.

        Views of such a weight are marked, and checked like the weight.
        """
        dtype = to_torch(self._compute)
        for tensor in given:
            weight = self._half_values.get(id(tensor)) or getattr(tensor, _PART_OF, None)
            if weight is not None and func.is_view:
                for view in made:
                    setattr(view, _PART_OF, weight)
            elif weight is not None and not reads_no_value(name) and (name, kwargs.get("dtype")) != ("_to_copy", dtype):
                raise other_use(weight, dtype, func)

    def _source(self, tensor: Tensor) -> _Source | None:
        """Return the pinned weight that ``tensor`` is, or comes from; else return ``None``."""
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
        """Mark each result that has its dtype from a pinned weight.

        It has the pin's dtype. It was made in a pinned forward, or is a view or copy of weights
        alone, or all inputs of its dtype come from pinned weights.
        """
        source, inside = next(iter(sources.values())), in_pinned_forward()
        weights = (sources[id(one)].whole if id(one) in sources else isinstance(one, nn.Parameter) for one in given)
        whole = moves and not inside and all(weights)
        for tensor in made:
            alike = (other for other in given if other.dtype == tensor.dtype)
            own = tensor.dtype == to_torch(source.member.pin.dtype) and self._source(tensor) is None
            if own and (inside or whole or all(id(other) in sources for other in alike)):
                setattr(tensor, _SOURCE, source._replace(whole=whole))

    def _follow_cast(self, given: list[Tensor], made: list[Tensor], name: str) -> None:
        """Mark results that are a pinned weight's values in another half format, with the call that cast it."""
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
        """Raise PlanError if autocast cast a pinned weight for this operator, outside of its module.

        Autocast's cast and the operator have the same place in the caller's code. A cast that the
        user wrote has a place of its own, and is intended. A table of learned queries that a layer
        multiplies is allowed too.
        """
        for tensor in given:
            source, call = getattr(tensor, _CAST, (None, None))
            if source is None or call != self._calls.current() or _in_pinned_call():
                continue
            # a table of learned queries may be multiplied by a layer, and is cast as any activation
            factors = [other for other in given if other.ndim > 1]
            if multiplies(source.member.module) or not factors or factors[0] is not tensor:
                raise _past_pin(source, f"in {dtype_name(tensor.dtype)}", name)

    def _explain_clash(self, error: RuntimeError, given: list[Tensor], sources: dict[int, _Source], name: str) -> None:
        """Raise PlanError from ``error`` if inputs of different dtypes clash, and one has a pin's dtype."""
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
    """Return the error for a pinned weight that operator ``name`` uses outside of its module."""
    member = source.member
    # a ParameterDict has no forward
    call = f"call {member.name!r} there, " if has_own_forward(member.module) else ""
    return PlanError.of(
        f"{member.name}.{source.key} is pinned to {member.pin.dtype} ({member.pin.pattern!r}), and something "
        f"outside of that module's forward computes with it {how} ({name}{users_line()})",
        f"{call}pin the module around it, compute there with autocast off, or remove the pin",
    )


class _Calls:
    """Numbers for the running calls of Python functions.

    The ``id`` of a frame is no such number, because a later frame may have the same. A frame is
    held while its call runs. Frames of finished calls are released at the next operator, because
    a frame holds the activations among its variables.
    """

    def __init__(self) -> None:
        #: the frames in which a weight was cast, by number
        self._frames: dict[int, FrameType] = {}
        self._count = 0

    def current(self) -> tuple[int, int] | None:
        """Return the number of the call that runs the current operator, and the position in its code.

        Return ``None`` if no Python frame calls it, as in a thread of the autograd engine.
        """
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
        """Release the frames of calls that have ended."""
        if not self._frames:
            return
        running = set[int]()
        frame = calling_frame(__file__)
        while frame is not None:
            running.add(id(frame))
            frame = frame.f_back
        self._frames = {number: frame for number, frame in self._frames.items() if id(frame) in running}


def _in_pinned_call() -> bool:
    """True if a pinned module is being called, its hooks included (``spectral_norm``, ``weight_norm``)."""
    frame = calling_frame(__file__)
    while frame is not None:
        own = frame.f_locals.get("self")
        if isinstance(own, nn.Module) and is_pinned(own):
            return True
        frame = frame.f_back
    return False
