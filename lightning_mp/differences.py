"""``first_difference``: the first module that differs between two plans, or between eager and compiled code."""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_mp.compat.torch import TorchDispatchMode, in_backward
from lightning_mp.errors import Faults, one_line
from lightning_mp.modules.patterns import has_own_forward, original_class
from lightning_mp.numerics.dtypes import cast_within_range, dtype_name, floating_in, map_tensors
from lightning_mp.numerics.rng import rng_state, set_rng_state
from lightning_mp.pin_advice import HARMFUL, ROUNDOFF, Call, PolicyCopy
from lightning_mp.plan.engine import NOTHING
from lightning_mp.plan.plan import MixedPrecisionPlan

#: the difference, in roundoffs, that rounding explains. fp32 has more: kernels may sum in another order.
EXPLAINED = {"fp32": 64.0, "bf16": HARMFUL, "fp16": HARMFUL}
#: the same for a gradient through several parts, in roots of a roundoff for each; a ResNet has up to 1.6
_FLIPS = 3.0
#: gradients below this share of the module's largest one are not compared: they consist of rounding
ROUNDING_ALONE = 1e-3


@dataclass(frozen=True, slots=True)
class DifferenceRow:
    """A module whose ``part`` (forward or backward) differs by ``error`` roundoffs, on the same inputs.

    ``operator`` is the first one whose result has another dtype on each side; ``dtypes`` are these two.
    """

    module: str
    kind: str
    part: str
    error: float
    operator: str
    dtypes: tuple[str, str]


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The result of :func:`first_difference`. ``str`` gives a table.

    ``rows`` are in the order of the forward pass, then of the backward pass; empty if nothing differs.
    """

    sides: tuple[str, str]
    rows: tuple[DifferenceRow, ...]
    #: the number of compared modules
    compared: int
    #: modules that cannot run alone, with the error of each
    left_out: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        a, b = self.sides
        notes = [f"{name} was left out: {said}" for name, said in self.left_out.items()]
        if not self.rows:
            return "\n".join([f"{a} and {b}: no module differs by more than its format explains.", *notes])
        first, width = self.rows[0], max(len("module"), *(len(row.module) for row in self.rows))
        lines = [f"a: {a}", f"b: {b}", f"{'module':{width}}  pass      roundoffs  operator, dtypes in a | b"]
        for row in self.rows:
            dtypes = f", {row.dtypes[0]} | {row.dtypes[1]}" if any(row.dtypes) else ""
            lines.append(f"{row.module:{width}}  {row.part:8}  {row.error:9.3g}  {row.operator}{dtypes}")
        said = f"The first difference is in the {first.part} pass of {first.module!r} ({first.kind})"
        return "\n".join([*lines, f"{said}, of {self.compared} modules compared on the same inputs.", *notes])


def first_difference(
    module: nn.Module, batch: Any, a: MixedPrecisionPlan | str, b: MixedPrecisionPlan | str, *, compile: str = ""
) -> FirstDifference:
    """Compare each module under plan ``a`` with itself under ``b``, on the inputs that it gets under ``a``.

    So a module that only passes on a different input does not count as different. In the backward pass both get the
    same random gradients. Copies of ``module`` run, with dropout off. ``module`` and the random generators stay as
    they are.

    Args:
        module: a LightningModule, whose ``training_step`` runs, or a module that takes the batch.
        batch: a batch, as the loop draws it.
        a: a plan, or its precision.
        b: the other plan; equal to ``a`` to compare eager and compiled code.
        compile: the backend of ``torch.compile`` that runs each module of ``b``, such as ``"aot_eager"``.

    Raises:
        PlanError: the module cannot run under a plan, a plan is FP8 or ``auto``, or both are equal without
            ``compile``.
    """
    plans = [one if isinstance(one, MixedPrecisionPlan) else MixedPrecisionPlan.from_config(one) for one in (a, b)]
    device = next((one.device for one in module.parameters()), torch.device("cpu"))
    with Faults("first_difference") as faults:
        for plan in plans:
            if plan.policy.fp8 is not None or plan.precision == "auto":
                faults.add(f"precision={plan.precision!r}", fix="write another mode: neither fp8 nor auto is compared")
        if plans[0].policy == plans[1].policy and not compile:
            faults.add("two equal plans", fix="write another, or compile='aot_eager' to compare eager and compiled")
    generators = rng_state(device)
    try:
        one, other = (_Side(module, plan.policy, device, generators) for plan in plans)
        other.backend = compile
        sides = repr(plans[0]), repr(plans[1]) + (f" compiled by {compile}" if compile else "")
        compared = _Comparison(one, other, batch)
        return FirstDifference(sides, tuple(compared.rows()), len(compared.calls), compared.left_out)
    finally:
        set_rng_state(generators, device)


class _Side(PolicyCopy):
    """A copy whose modules are called one by one, compiled if there is a ``backend``."""

    subject, backend = "first_difference", ""

    def results(self, name: str, given: Any, watch: Any = NOTHING) -> tuple[list[Tensor], list[Tensor | None]]:
        """Run one module and return its outputs, and the gradients of its inputs and parameters.

        The gradients of its outputs are random, equal in each call.
        """
        module = self.named[name]
        if self.backend:
            torch.compiler.reset()  # each module is compiled as if it were alone
            module = cast("nn.Module", torch.compile(module, backend=self.backend))
        with warnings.catch_warnings():  # torch.compile asks for it of every input
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            return self.passes(module, given, self._random_gradients, watch)

    def _random_gradients(self, outputs: list[Tensor]) -> dict[int, Tensor]:
        generator = torch.Generator(self.device).manual_seed(0)
        sizes = {at: output.shape for at, output in enumerate(outputs) if output.requires_grad}
        return {at: torch.randn(size, generator=generator, device=self.device).bfloat16() for at, size in sizes.items()}


class _Comparison:
    """Runs ``a`` once, then each module of both sides on the inputs that it had in ``a``."""

    def __init__(self, a: _Side, b: _Side, batch: Any) -> None:
        self._sides = self._a, self._b = a, b
        coarser = max((a.policy.compute_dtype, b.policy.compute_dtype), key=lambda name: ROUNDOFF[name])
        self._unit, self._limit = ROUNDOFF[coarser], EXPLAINED[coarser]
        self._differs: dict[tuple[str, str], tuple[float, str, tuple[str, str]]] = {}
        self.left_out: dict[str, str] = {}
        names = [name for name, module in a.named.items() if name and has_own_forward(module)]
        #: the dtypes of the inputs of each call under ``b``
        dtypes: dict[str, list[list[torch.dtype]]] = {name: [] for name in names}
        with b.recorded(names) as calls:
            b.run(batch)
        for call in calls:
            dtypes[call.name].append([tensor.dtype for tensor in floating_in(call.given)])
        with a.recorded(names) as calls:
            a.run(batch)
        #: the compared modules, in the order of the forward pass
        self.calls = list(dict.fromkeys(call.name for call in calls))
        for call in calls:
            self._compare(call, dtypes[call.name])

    def rows(self) -> Iterator[DifferenceRow]:
        """Yield the innermost modules that differ, in the order of the forward pass, then of the backward pass."""
        for part in ("forward", "backward"):
            names = [name for name in self.calls if (name, part) in self._differs]
            innermost = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
            for name in innermost if part == "forward" else innermost[::-1]:
                kind = original_class(self._a.named[name]).__name__
                yield DifferenceRow(name, kind, part, *self._differs[name, part])

    def _compare(self, call: Call, dtypes: list[list[torch.dtype]]) -> None:
        name = call.name
        try:
            inputs = _rounded(call.given, dtypes.pop(0))
            for part, error, terms in self._errors(name, inputs):
                if error > max(self._explained(name, part, terms), self._differs.get((name, part), (0.0,))[0]):
                    self._differs[name, part] = error, *self._operators(name, inputs, part)
        except Exception as error:  # a module that cannot be called by itself
            self.left_out.setdefault(name, one_line(error))

    def _explained(self, name: str, part: str, terms: float) -> float:
        """Return the number of roundoffs that rounding explains. Errors of a module's parts add like random numbers.

        A gradient has been through two passes. Between parts, rounding flips a few signs before a ReLU, which moves
        the gradient by the root of a roundoff. A CPU's LayerNorm sums the gradient of its weight in half precision:
        the error of n terms is 0.3 to 1.01 times the root of n (measured for 64 to 65,536).
        """
        parts = max(1, sum(not any(module.children()) for module in self._a.named[name].modules()))
        explained = self._limit * math.sqrt(parts)
        if part == "forward":
            return explained
        return max(2 * explained, 2 * math.sqrt(terms), _FLIPS * math.sqrt(parts / self._unit) if parts > 1 else 0.0)

    def _errors(self, name: str, inputs: tuple[Any, Any]) -> Iterator[tuple[str, float, float]]:
        """Yield (part, error, summed terms) for the outputs, the gradients of inputs, and those of parameters."""
        ours, theirs = (side.results(name, given) for side, given in zip(self._sides, inputs, strict=True))
        forward, backward = (_relative(*pair) for pair in zip(ours, theirs, strict=True))
        leaves = floating_in(inputs[0])
        largest = max((tensor.numel() for tensor in leaves), default=0)
        trained = (parameter for parameter in self._a.named[name].parameters() if parameter.requires_grad)
        smallest = min((parameter.numel() for parameter in trained), default=1)
        terms = largest / max(smallest, 1) if self._a.device.type == "cpu" and self._limit == HARMFUL else 0.0
        yield "forward", max(forward, default=0.0) / self._unit, 0.0
        yield "backward", max(backward[: len(leaves)], default=0.0) / self._unit, 0.0
        yield "backward", max(backward[len(leaves) :], default=0.0) / self._unit, terms

    def _operators(self, name: str, inputs: tuple[Any, Any], part: str) -> tuple[str, tuple[str, str]]:
        """Return the first operators whose results have two dtypes, and these dtypes.

        The operators of a compiled module cannot be observed: the dtypes are empty then.
        """
        if self._b.backend:
            return f"compiled by {self._b.backend}", ("", "")
        seen: list[list[tuple[str, str]]] = []
        for side, given in zip(self._sides, inputs, strict=True):
            operators = _Operators()
            side.results(name, given, operators)
            seen.append(operators.seen[part == "backward"])
        computing = [[each for each in side if each[0] not in _MOVES] for side in seen]
        for ours, theirs in (*zip(*computing, strict=False), *zip(*seen, strict=False)):
            if ours[1] != theirs[1]:
                return " | ".join(dict.fromkeys((ours[0], theirs[0]))), (ours[1], theirs[1])
        return "the same operators and dtypes", ("", "")


def _rounded(given: Any, theirs: list[torch.dtype]) -> tuple[Any, Any]:
    """Return the inputs of this side and of the other, rounded alike, each in its own dtypes.

    ``theirs`` has the other side's dtype of each floating tensor in ``given``, in order. Each such
    tensor is detached, rounded to the coarser of its two dtypes, then cast to the side's own.
    Finite numbers stay finite.
    """
    ours = [tensor.dtype for tensor in floating_in(given)]
    coarse = [max(pair, key=lambda dtype: torch.finfo(dtype).eps) for pair in zip(ours, theirs, strict=True)]

    def cast_each(dtypes: list[torch.dtype]) -> Any:
        turn = zip(coarse, dtypes, strict=True)

        def rounded(tensor: Tensor) -> Tensor:
            # The range is kept, because a mask of fp32's lowest number would be -inf in bf16, and its row NaN.
            return reduce(cast_within_range, next(turn), tensor.detach()) if tensor.is_floating_point() else tensor

        return map_tensors(given, rounded)

    return cast_each(ours), cast_each(theirs)


#: operators that compute nothing, and the one that makes the random gradients
_MOVES = ("_to_copy", "clone", "copy_", "detach", "randn")


class _Operators(TorchDispatchMode):
    """Records each operator that computes something and the dtype of its result, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple[list[tuple[str, str]], list[tuple[str, str]]] = [], []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = floating_in(out)
        if results and not func.is_view:
            self.seen[in_backward()].append((func.overloadpacket.__name__, dtype_name(results[0].dtype)))
        return out


def _relative(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> list[float]:
    """Return the relative difference of each pair; NaN counts as infinite, an absent tensor as equal.

    A tensor that is small beside the largest one is compared with a share of that one.
    """
    pairs = [
        (torch.zeros(0),) * 2 if one is None or two is None else (one.float(), two.float())
        for one, two in zip(ours, theirs, strict=True)
    ]
    sizes = [_size(two) for _, two in pairs]
    least = max(ROUNDING_ALONE * max(sizes, default=0.0), torch.finfo(torch.float32).tiny)
    errors = [_size(one - two) / max(size, least) for (one, two), size in zip(pairs, sizes, strict=True)]
    return [math.inf if math.isnan(error) else error for error in errors]


def _size(tensor: Tensor) -> float:
    return tensor.pow(2).mean().sqrt().item() if tensor.numel() else 0.0
