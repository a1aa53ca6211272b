"""``suggest_pins``: which modules to pin to fp32, found by comparing outputs and gradients with those of fp32."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from statistics import median_high
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_mp.compat.lightning import move_data_to_device
from lightning_mp.errors import Faults, PlanError
from lightning_mp.modules.patterns import has_own_forward, matches, named_submodules, original_class
from lightning_mp.numerics.dtypes import TORCH_DTYPES, cast_floating, describe, floating_in, to_torch
from lightning_mp.numerics.loss_scale import LossScaler
from lightning_mp.numerics.rng import rng_state, set_rng_state
from lightning_mp.plan import for_strategy
from lightning_mp.plan.eager import EagerEngine
from lightning_mp.plan.plan import MixedPrecisionPlan
from lightning_mp.plan.side_run import loss_of, output_in
from lightning_mp.policy import Pin, PrecisionPolicy

#: half a unit in the last place of a number in the format, relative to it
ROUNDOFF = {name: torch.finfo(dtype).eps / 2 for name, dtype in TORCH_DTYPES.items()}
#: a module's own error, in roundoffs, above which it is flagged. Measured: healthy up to 1.9, harmful from 9.5 on
HARMFUL = 4.0
#: an error of the gradients up to which it is rounding alone: in roundoffs, or as a number, whichever is larger
ORDINARY, LEAST = 10.0, 0.02
#: a gradient below this share of the median is rounding alone (a bias before a BatchNorm), and is left out
ROUNDING_ALONE = 1e-4
#: the share of a class's modules that has to do harm before the class is pinned instead of the modules
KIND = 0.7
#: how many patterns are tried at most; each costs a backward pass of every batch
TRIED = 12

#: gradients of a batch by parameter name
Gradients = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class PinRow:
    """One suggested pin.

    ``modules`` and ``params`` are the numbers of modules with parameters, and of parameters, that it covers;
    ``error_before`` is the error of the gradients without this pin, ``error_after`` with it, both with the other pins.
    """

    pattern: str
    dtype: str
    modules: int
    error_before: float
    error_after: float
    params: int


@dataclass(frozen=True, slots=True)
class PinAdvice:
    """What :func:`suggest_pins` found; printing it gives a table, the pins to paste, and what they cost.

    Errors are between 0 and 1: the root mean square, over parameters and batches, of the relative difference between
    the plan's gradient and fp32's, each at most 1.
    """

    rows: tuple[PinRow, ...]
    error_before: float
    error_after: float
    policy: PrecisionPolicy

    @property
    def pins(self) -> dict[str, str]:
        """Pattern to dtype, most harmful first; empty where there is nothing to gain."""
        return {row.pattern: row.dtype for row in self.rows}

    def to_dict(self) -> dict[str, Any]:
        """``pins`` and ``rows``, as plain values."""
        return {"pins": self.pins, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        precision, before = self.policy.precision, f"{self.error_before:.2g}"
        if not self.rows:
            differ = f"under {precision} gradients differ from fp32's by {before}"
            return f"No pins: {differ}, which is rounding, or no pin halves it."
        width = max(len("pattern"), *(len(row.pattern) for row in self.rows))
        lines = [f"{'pattern':{width}}  dtype  modules  without   with      params"]
        lines += [
            f"{row.pattern:{width}}  {row.dtype:5}  {row.modules:7}  {row.error_before:<8.2g}  {row.error_after:<8.2g}"
            f"  {row.params:,}"
            for row in self.rows
        ]
        whole = {**self.pins, **{pin.pattern: pin.dtype for pin in self.policy.pins if pin.pattern not in self.pins}}
        extra = sum(row.params for row in self.rows) * (4 - to_torch(self.policy.compute_dtype).itemsize)
        held = "computed with in fp32" if self.policy.mixed else "stored in fp32"
        lines += [
            f"Gradients differ from fp32's by {before} under {precision}, by {self.error_after:.2g} with these pins.",
            f"Write MixedPrecisionPlan({precision!r}, pins={whole!r}).",
            f"They are {held}: {extra:,} bytes more for each copy of these weights.",
        ]
        return "\n".join(lines)


def suggest_pins(
    module: nn.Module,
    batches: Iterable[Any],
    plan: MixedPrecisionPlan | str,
    *,
    steps: int = 8,
    tolerance: float = 0.1,
    max_pins: int = 4,
) -> PinAdvice:
    """Find the fewest modules that, pinned to fp32, bring the plan's gradients as near to fp32's as rounding allows.

    Copies of ``module`` run forward and backward on its device, about ten passes a batch and more where something is
    wrong; the gradients of every batch are kept. ``module`` and the generators are as before. Dropout is off.

    Args:
        module: a LightningModule, whose ``training_step`` returns the loss, or a module that returns one.
        batches: as the loop draws them; at most ``steps`` are.
        plan: a plan, or its precision; its pins stay. FP8 products are measured as the bf16 ones that they replace.
        steps: how many batches at most.
        tolerance: a pin is left out where that gives up no more than this part of what the pins gain.
        max_pins: how many pins at most.

    Raises:
        PlanError: no batch, no scalar loss, gradients that are not finite in fp32 either, a plan that the module cannot
            run under, a ``training_step`` that needs its Trainer.
    """
    plan = plan if isinstance(plan, MixedPrecisionPlan) else MixedPrecisionPlan.from_config(plan)
    first = next(module.parameters(), None)
    with Faults("suggest_pins") as faults:
        faults.whole("steps", steps, 1, "leave it out")
        faults.whole("max_pins", max_pins, 1, "leave it out")
        if first is None:
            fix = "have configure_model() or setup() make them first"
            faults.add(f"{type(module).__name__} without parameters", fix=fix)
    device = faults.unwrap(first).device
    generators = rng_state(device)
    try:
        drawn = list(islice(batches, steps))
        if not drawn:
            raise PlanError.of(f"batches={batches!r} hold none", "give a list, or a loader", "suggest_pins")
        return _Search(module, drawn, plan, device, generators).advice(tolerance, max_pins)
    finally:
        set_rng_state(generators, device)


class _Search:
    """Runs copies of one module under sets of pins, and compares their gradients."""

    def __init__(
        self, module: nn.Module, batches: Sequence[Any], plan: MixedPrecisionPlan, device: torch.device, rng: Any
    ) -> None:
        policy = plan.policy
        if policy.precision == "auto":
            policy = for_strategy.resolved(policy, describe(device), module)
        precision = "bf16-mixed" if policy.fp8 is not None else policy.precision
        self.policy = replace(policy, precision=precision, fp8=None, checkpointing=None)
        self._reference = PrecisionPolicy(precision="32-true")
        self._module, self._batches, self._device, self._rng = module, batches, device, rng
        self._errors: dict[tuple[str, ...], float | None] = {}
        self._exact = list(self._gradients(self._reference))
        for index, found in enumerate(self._exact):
            if not all(bool(gradient.isfinite().all()) for gradient in found.values()):
                what = f"batch {index}, whose gradients are not finite in fp32 either"
                raise PlanError.of(what, "look for the cause in it, or leave it out", "suggest_pins")

    # ------------------------------------------------------------------ gradients

    def _prepared(self, policy: PrecisionPolicy) -> nn.Module:
        """A copy of the module as it runs under ``policy``."""
        copied = deepcopy(self._module)
        engine = EagerEngine(policy, device=self._device, scaler=LossScaler(), distributed=False, global_step=lambda: 0)
        with Faults("suggest_pins") as faults:
            engine.check(copied, faults)
        engine.prepare(copied)
        for dropout in (one for one in copied.modules() if original_class(one).__name__.endswith("Dropout")):
            dropout.eval()  # two formats need not draw the same numbers
        return copied

    def _loss(self, copied: nn.Module, batch: Any, policy: PrecisionPolicy) -> Tensor:
        set_rng_state(self._rng, self._device)
        batch = move_data_to_device(deepcopy(batch), self._device)
        autocast = policy.compute_dtype if policy.mixed else None
        try:
            output = output_in(copied, batch, self._device, autocast=autocast, storage=policy.storage_dtype)
        except RuntimeError as error:
            if "not attached to a `Trainer`" not in str(error):
                raise
            what = f"{type(self._module).__name__}.training_step, which needs its Trainer"
            raise PlanError.of(what, "give an nn.Module that returns the loss", "suggest_pins") from error
        loss: Any = loss_of(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"{type(self._module).__name__} gave no scalar loss with a gradient"
            raise PlanError.of(what, "return the loss from training_step or forward", "suggest_pins")
        return loss.reshape(()).float()

    def _gradients(self, policy: PrecisionPolicy) -> Iterator[Gradients]:
        """Of each batch in fp32, unscaled; under fp16 from the highest scale at which they are finite."""
        copied = self._prepared(policy)
        named = [(name, one) for name, one in copied.named_parameters() if one.requires_grad]
        rule = policy.loss_scaling
        scales = [1.0] if rule is None else [rule.init_scale / 16**power for power in range(5)]
        for batch in self._batches:
            loss = self._loss(copied, batch, policy)
            found: Gradients = {}
            for scale in scales:
                last, weights = scale == scales[-1], [one for _, one in named]
                raw: Any = torch.autograd.grad(loss * scale, weights, retain_graph=not last, allow_unused=True)
                pairs = zip(named, raw, strict=True)
                found = {name: gradient.float() / scale for (name, _), gradient in pairs if gradient is not None}
                if all(bool(gradient.isfinite().all()) for gradient in found.values()):
                    break
            yield found

    def error(self, patterns: Sequence[str]) -> float | None:
        """The error of the gradients with these pins, 0 to 1; ``None`` where the module does not run with them."""
        key = tuple(patterns)
        if key not in self._errors:
            pins = (*(Pin(pattern, "fp32") for pattern in key), *self.policy.pins)
            try:
                found = self._gradients(replace(self.policy, pins=pins))
                self._errors[key] = _distance(self._exact, found)
            except Exception:
                if not key:
                    raise  # it does not run without them either
                self._errors[key] = None
        return self._errors[key]

    # ------------------------------------------------------------------ the error of each module

    def harmful(self) -> dict[str, float]:
        """Names of the innermost modules that add an error of their own, in roundoffs, beyond what rounding does."""
        found: dict[str, float] = {}
        for batch in self._batches[:2]:
            copied, planned = self._prepared(self._reference), dict(self._prepared(self.policy).named_modules())
            with _each_call(copied, planned, self._own_error, found):
                self._loss(copied, batch, self._reference)
        flagged = {name: error for name, error in found.items() if error > HARMFUL}
        return {
            name: error for name, error in flagged.items() if not any(other.startswith(f"{name}.") for other in flagged)
        }

    def _own_error(self, exact: nn.Module, planned: nn.Module, args: Any, kwargs: Any) -> float:
        dtype = to_torch(self.policy.compute_dtype)
        rounded = cast_floating((args, kwargs), dtype)
        outputs: list[Any] = []
        for one, given, mixed in (
            (planned, rounded, self.policy.mixed),
            (exact, cast_floating(rounded, torch.float32), False),
        ):
            set_rng_state(self._rng, self._device)
            positional, keywords = deepcopy(given)
            with torch.autocast(self._device.type, dtype, enabled=mixed, cache_enabled=False):
                outputs.append(one(*positional, **keywords))
        pairs = zip(*map(floating_in, outputs), strict=True)
        roundoff = ROUNDOFF[self.policy.compute_dtype]
        return max((_relative(ours, theirs) / roundoff for ours, theirs in pairs), default=0.0)

    # ------------------------------------------------------------------ pins

    def advice(self, tolerance: float, max_pins: int) -> PinAdvice:
        """The pins, each with the error without and with it."""
        before = cast("float", self.error(()))
        kept: list[str] = []
        if before > max(LEAST, ORDINARY * ROUNDOFF[self.policy.compute_dtype]):
            kept = self._fewest(self._harmful_patterns(), before, tolerance)
            kept = kept or self._fewest(self._kinds(), before, tolerance)
        rows = [self._row(pattern, kept) for pattern in kept]
        rows = sorted(rows, key=lambda row: row.error_before, reverse=True)[:max_pins]
        after = self.error([row.pattern for row in rows])
        return PinAdvice(tuple(rows), before, before if after is None else after, self.policy)

    def _harmful_patterns(self) -> list[str]:
        """Patterns of what does harm, worst first."""
        harmful, named = self.harmful(), list(named_submodules(self._module))
        worst = sorted(harmful, key=lambda name: -harmful[name])
        return list(dict.fromkeys(_pattern(name, harmful, named) for name in worst))

    def _kinds(self) -> list[str]:
        """Classes of modules, the smallest first, for errors that arise in the backward pass alone."""
        sizes: dict[str, int] = {}
        for _, module in named_submodules(self._module):
            kind, size = original_class(module).__name__, sum(one.numel() for one in module.parameters())
            if has_own_forward(module) and size:
                sizes[kind] = sizes.get(kind, 0) + size
        return sorted(sizes, key=lambda kind: sizes[kind])

    def _fewest(self, patterns: list[str], before: float, tolerance: float) -> list[str]:
        """Pins that together at least halve the error, without those that can go; none where they do not halve it."""
        kept = [pattern for pattern in patterns[:TRIED] if self.error([pattern]) is not None]
        # All together first: where two heads overflow, pinning one alone does not help.
        best = self.error(kept) if kept else None
        if best is None or best > before / 2:
            return []
        for pattern in kept[::-1]:
            fewer = [other for other in kept if other != pattern]
            error = self.error(fewer)
            if error is not None and error <= best + tolerance * (before - best):
                kept = fewer
        return kept

    def _row(self, pattern: str, kept: Sequence[str]) -> PinRow:
        covered = [one for name, one in named_submodules(self._module) if matches(pattern, name, one)]
        below = {id(one): one for root in covered for one in root.modules()}
        owners = [one for one in below.values() if next(one.parameters(recurse=False), None) is not None]
        parameters = {id(one): one.numel() for owner in owners for one in owner.parameters(recurse=False)}
        errors = [self.error([other for other in kept if other != pattern]), self.error(kept)]
        before, after = (1.0 if error is None else error for error in errors)
        return PinRow(pattern, "fp32", len(owners or covered), before, after, sum(parameters.values()))


# ------------------------------------------------------------------ numbers and names


def _distance(exact: Sequence[Gradients], found: Iterable[Gradients]) -> float:
    """The root mean square of the relative differences, each at most 1, without gradients that are rounding alone."""
    squares: list[float] = []
    for theirs, ours in zip(exact, found, strict=True):
        norms = {name: gradient.norm().item() for name, gradient in theirs.items()}
        known = [norm for norm in norms.values() if 0 < norm < float("inf")]
        least = ROUNDING_ALONE * median_high(known) if known else float("inf")
        for name in (name for name, norm in norms.items() if least <= norm < float("inf")):
            one = ours.get(name)
            squares.append(1.0 if one is None else min(1.0, _relative(one, theirs[name])) ** 2)
    return (sum(squares) / len(squares)) ** 0.5 if squares else 0.0


def _relative(ours: Tensor, theirs: Tensor) -> float:
    """The norm of the difference over that of ``theirs``, where those are finite; infinite where ``ours`` is not."""
    if ours.shape != theirs.shape:
        return 0.0
    known = theirs.isfinite()
    ours, theirs = ours.float()[known], theirs.float()[known]
    if not bool(ours.isfinite().all()):
        return float("inf")
    scale = theirs.norm().item()
    return (ours - theirs).norm().item() / scale if scale else 0.0


@contextmanager
def _each_call(
    root: nn.Module, planned: Mapping[str, nn.Module], own_error: Callable[..., float], found: dict[str, float]
) -> Generator[None, None, None]:
    """Within, every call of a module below ``root`` is measured; ``found`` gets the largest error of each name."""
    inside = False

    def called(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal inside
        if inside:
            return
        inside = True
        try:
            with torch.no_grad():
                found[name] = max(found.get(name, 0.0), own_error(module, planned[name], args, kwargs))
        except Exception:  # a module that cannot be called by itself, or with rounded inputs
            found.setdefault(name, 0.0)
        finally:
            inside = False

    with ExitStack() as stack:
        for name, module in root.named_modules():
            if name:
                hook = module.register_forward_pre_hook(partial(called, name), with_kwargs=True)
                stack.callback(hook.remove)
        yield


def _pattern(name: str, harmful: Mapping[str, float], named: Sequence[tuple[str, nn.Module]]) -> str:
    """The module's class, or the last part of its name, where most modules of that do harm; else its whole name."""
    kinds = {other: original_class(module).__name__ for other, module in named if has_own_forward(module)}
    last = name.rpartition(".")[2]
    for pattern in (kinds[name], last):
        same = [other for other in kinds if pattern in (kinds[other], other.rpartition(".")[2])]
        several = len(same) > 1 and not pattern.isdigit()
        if several and sum(other in harmful for other in same) >= KIND * len(same):
            return pattern
    return name
