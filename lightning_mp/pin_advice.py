"""``suggest_pins``: the modules to pin to fp32, measured by comparing outputs and gradients with fp32's."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from statistics import median_high
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mp.compat.lightning import LightningModule, move_data_to_device
from lightning_mp.errors import Faults, PlanError
from lightning_mp.modules.fp8 import is_converted
from lightning_mp.modules.patterns import has_own_forward, matches, named_submodules, original_class
from lightning_mp.numerics.dtypes import (
    TORCH_DTYPES,
    cast_floating,
    default_dtype,
    describe,
    floating_in,
    map_tensors,
    to_torch,
)
from lightning_mp.numerics.loss_scale import LossScaler
from lightning_mp.numerics.rng import rng_state, set_rng_state
from lightning_mp.plan import for_strategy
from lightning_mp.plan.engine import NOTHING, EagerEngine
from lightning_mp.plan.plan import MixedPrecisionPlan
from lightning_mp.plan.side_run import loss_of, output_in
from lightning_mp.policy import FP8, LossScaling, Pin, PrecisionPolicy

if TYPE_CHECKING:
    from lightning_mp.comparison.results import Comparison

#: half a unit in the last place of a number in the format, relative to it
ROUNDOFF = {name: torch.finfo(dtype).eps / 2 for name, dtype in TORCH_DTYPES.items()}
#: a module's own error, in roundoffs, above which it is flagged. Measured: healthy up to 1.9, harmful from 9.5 on.
#: The error of its gradients is in roots of a roundoff, because rounding turns a ReLU on or off: healthy up to 2.
HARMFUL = 4.0
#: the largest share of the parameters that pins may cover: more would be fp32, not pins. The second is for errors that
#: only gradients show, to which every part of a deep net contributes a little.
SHARE, SHARE_BACK = 0.95, 0.5
#: the error of gradients that rounding alone explains: in roundoffs, or as a number, whichever is larger
ORDINARY, LEAST = 10.0, 0.02
#: gradients below this share of the median are left out: they consist of rounding (a bias before a BatchNorm)
ROUNDING_ALONE = 1e-4
#: the share of harmful modules of a class from which the class is pinned instead of the modules
KIND = 0.7
#: the relative error of a row under FP8 above which its layer is flagged: healthy layers have up to 0.07
HARMFUL_FP8 = 0.25
#: the largest number of patterns that are tried; each costs a backward pass of every batch
TRIED = 12
#: the number of powers of 16 that are tried below the lowest scale of the plan's rule
LOWER = 6
#: the number of pairs of runs that confirm a suggestion, and their steps
SEEDS, STEPS = 4, 40

#: gradients of a batch by parameter name
Gradients = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class PinRow:
    """One suggested pin, or a layer to leave out of FP8.

    ``modules`` and ``params`` are the numbers of covered modules with parameters, and of covered parameters.
    ``error_before`` is the error of the gradients without this row, ``error_after`` the error with it. The other rows
    apply in both.
    """

    pattern: str
    dtype: str
    modules: int
    error_before: float
    error_after: float
    params: int


@dataclass(frozen=True, slots=True)
class PinAdvice:
    """The result of :func:`suggest_pins`. ``str`` gives a table, the pins to paste, and their cost in bytes.

    Errors are between 0 and 1. They are the root mean square, over parameters and batches, of the relative difference
    between the plan's gradient and fp32's. Each difference counts as 1 at most.
    """

    rows: list[PinRow]
    error_before: float
    error_after: float
    policy: PrecisionPolicy
    #: layers to leave out of FP8; empty if the plan has no FP8
    fp8_rows: tuple[PinRow, ...] = ()
    #: errors under FP8 without and with ``fp8_rows``; ``None`` if the plan has no FP8
    fp8_errors: tuple[float, float] | None = None
    #: a loss scale that works, if the backward pass overflows at every scale of the plan's rule and no pin helps
    scale: float | None = None
    #: the runs with and without the suggestion; ``None`` without ``confirm=True``, or without a suggestion
    comparison: Comparison | None = None

    @property
    def pins(self) -> dict[str, str]:
        """Return pattern to dtype, most harmful first; empty if no pin helps."""
        return {row.pattern: row.dtype for row in self.rows}

    @property
    def fp8_skip(self) -> tuple[str, ...]:
        """Return names for ``FP8(skip=...)``, besides the plan's own."""
        return tuple(row.pattern for row in self.fp8_rows)

    @property
    def confirmed(self) -> bool | None:
        """True if runs without the suggestion end with a higher loss; ``None`` if none were made."""
        return None if self.comparison is None else self.comparison.verdict == "worse"

    def suggested(self) -> PrecisionPolicy:
        """Return the plan's policy with the suggested pins, FP8 layers and loss scale."""
        pins = (*(Pin(row.pattern, row.dtype) for row in self.rows), *self.policy.pins)
        fp8, rule = self.policy.fp8, self.policy.loss_scaling
        if fp8 is not None:
            fp8 = replace(fp8, skip=(*fp8.skip, *self.fp8_skip))
        if rule is not None and self.scale is not None:
            rule = replace(rule, init_scale=self.scale, min_scale=0.0)
        return replace(self.policy, pins=pins, fp8=fp8, loss_scaling=rule)

    def to_dict(self) -> dict[str, Any]:
        """Return ``pins`` and ``rows`` as plain values; ``fp8_skip``, ``scale`` and ``confirmed`` if there are any."""
        plain: dict[str, Any] = {"pins": self.pins, "rows": [asdict(row) for row in self.rows]}
        if self.fp8_errors is not None:
            plain |= {"fp8_skip": list(self.fp8_skip), "fp8_rows": [asdict(row) for row in self.fp8_rows]}
        several = {"scale": self.scale, "confirmed": self.confirmed}
        return plain | {name: value for name, value in several.items() if value is not None}

    def __str__(self) -> str:
        policy, before, after = self.policy, f"{self.error_before:.2g}", f"{self.error_after:.2g}"
        precision = "bf16-mixed" if policy.fp8 is not None else policy.precision
        lines: list[str] = []
        if self.rows:
            pins = {**self.pins, **{pin.pattern: pin.dtype for pin in policy.pins if pin.pattern not in self.pins}}
            extra = sum(row.params for row in self.rows) * (4 - to_torch(policy.compute_dtype).itemsize)
            held = "computed with in fp32" if policy.mixed else "stored in fp32"
            lines = [
                *_table(self.rows, "pattern"),
                f"Gradients differ from fp32's by {before} under {precision}, by {after} with these pins.",
                f"Write MixedPrecisionPlan({policy.precision!r}, pins={pins!r}).",
                f"They are {held}: {extra:,} bytes more for each copy of these weights.",
            ]
        elif self.scale is None:
            differ = f"under {precision} gradients differ from fp32's by {before}"
            lines = [f"No pins: {differ}, which is rounding, or no pin halves it."]
        if self.scale is not None:
            rule = self.suggested().loss_scaling
            lines += [
                "The backward pass overflows from a finite loss, at every scale of the plan's rule.",
                f"At {self.scale:g} it does not: write loss_scaling={rule!r}, or divide the loss.",
            ]
        if self.fp8_errors is not None:
            without, with_skip = (f"{error:.2g}" for error in self.fp8_errors)
            lines += [f"No layer to leave out of FP8: with it gradients differ from fp32's by {without}."]
            if self.fp8_rows:
                lines[-1:] = [
                    *_table(self.fp8_rows, "layer"),
                    f"In FP8 gradients differ from fp32's by {without}, by {with_skip} without these layers.",
                    f"Write FP8(skip={[*cast('FP8', self.suggested().fp8).skip]!r}).",
                ]
        if self.comparison is not None:
            verdict = self.comparison.differences[0]
            runs = f"{len(self.comparison.seeds)} pairs of runs of {self.comparison.steps} steps"
            word = "Confirmed" if self.confirmed else "Not confirmed"
            lines.append(f"{word} by {runs}: the loss without it is {verdict.verdict} ({verdict.reason}).")
        return "\n".join(lines)


def _table(rows: Sequence[PinRow], head: str) -> list[str]:
    width = max(len(head), *(len(row.pattern) for row in rows))
    return [f"{head:{width}}  dtype  modules  without   with      params"] + [
        f"{row.pattern:{width}}  {row.dtype:5}  {row.modules:7}  {row.error_before:<8.2g}  {row.error_after:<8.2g}"
        f"  {row.params:,}"
        for row in rows
    ]


def suggest_pins(
    module: nn.Module,
    batches: Iterable[Any],
    plan: MixedPrecisionPlan | str,
    *,
    steps: int = 8,
    tolerance: float = 0.1,
    max_pins: int = 4,
    confirm: bool = False,
) -> PinAdvice:
    """Find the fewest modules that, pinned to fp32, bring the plan's gradients as near to fp32's as rounding allows.

    Under FP8 also find the layers to leave out of it. If a finite loss has infinite gradients and no pin helps, find a
    loss scale that works. Copies of ``module`` run forward and backward on its device: about ten passes a batch, more
    if modules are harmful. The gradients of every batch are kept in memory. Dropout is off. ``module`` and the random
    generators stay as they are.

    Args:
        module: a LightningModule, whose ``training_step`` returns the loss, or a module that returns one.
        batches: an iterable of batches, as a DataLoader gives them. At most ``steps`` are drawn.
        plan: a plan, or its precision. Its own pins stay. FP8 is emulated if the device has no units for it.
        steps: the largest number of batches.
        tolerance: a pin is dropped if the others keep all but this share of the gain.
        max_pins: the largest number of pins, and of layers to leave out of FP8.
        confirm: train copies with and without the suggestion, by ``compare``: 4 pairs of runs of 40 steps on the
            drawn batches, each pair in another order. It needs a LightningModule.

    Raises:
        PlanError: a bad argument, no batch, no scalar loss, gradients that are not finite in fp32 either, or a plan
            that cannot run on the module.
    """
    plan = plan if isinstance(plan, MixedPrecisionPlan) else MixedPrecisionPlan.from_config(plan)
    first = next(module.parameters(), None)
    with Faults("suggest_pins") as faults:
        faults.whole("steps", steps, 1, "leave it out")
        faults.whole("max_pins", max_pins, 1, "leave it out")
        if first is None:
            fix = "have configure_model() or setup() make them first"
            faults.add(f"{type(module).__name__} without parameters", fix=fix)
        if confirm and not isinstance(module, LightningModule):
            given = f"confirm=True with a {type(module).__name__}, which has no optimizer"
            faults.add(given, fix="give a LightningModule")
    device = faults.unwrap(first).device
    generators = rng_state(device)
    try:
        drawn = list(islice(batches, steps))
        if not drawn:
            raise PlanError.of(f"batches={batches!r} hold none", "give a list, or a loader", "suggest_pins")
        advice = _Search(module, drawn, plan.policy, generators, tolerance, max_pins).advice()
        harmful = bool(advice.rows or advice.fp8_rows or advice.scale)
        return _confirmed(advice, cast("Any", module), drawn, device) if confirm and harmful else advice
    finally:
        set_rng_state(generators, device)


def _confirmed(advice: PinAdvice, module: LightningModule, batches: list[Any], device: torch.device) -> PinAdvice:
    """Return the advice with a comparison of runs with and without it."""
    from lightning_mp.comparison.compare import compare  # here, because it loads the drawing of pages

    def loader() -> DataLoader[Any]:
        return DataLoader(cast("Any", batches), batch_size=None, shuffle=True, collate_fn=deepcopy)

    plans = {"with it": advice.suggested(), "without it": advice.policy}
    accelerator = "cpu" if device.type == "cpu" else "auto"
    comparison = compare(module, loader, plans, seeds=SEEDS, steps=STEPS, accelerator=accelerator)
    return replace(advice, comparison=comparison)


class Call(NamedTuple):
    """A call of a module: copies of its arguments and keywords, and the gradients of its outputs by index."""

    name: str
    given: Any
    gradients: dict[int, Tensor]


class PolicyCopy:
    """A copy of a module under a policy. Each run begins with the same random numbers.

    Raises:
        PlanError: the policy cannot run on the module.
    """

    subject = "suggest_pins"

    def __init__(self, module: nn.Module, policy: PrecisionPolicy, device: torch.device, rng: Any) -> None:
        self.root, self.policy, self.device, self._rng = deepcopy(module), policy, device, rng
        engine = EagerEngine(policy, device=device, scaler=LossScaler(), distributed=False)
        with Faults(self.subject) as faults:
            engine.check(self.root, faults)
        engine.prepare(self.root)
        self.named = dict(self.root.named_modules())
        for part in self.named.values():
            if original_class(part).__name__.endswith("Dropout"):  # two formats need not draw the same numbers
                part.eval()
            config: Any = getattr(part, "config", None)
            if getattr(config, "use_cache", False):  # calls add to it
                config.use_cache = False

    def run(self, batch: Any) -> Any:
        """Run the step and return its result."""
        set_rng_state(self._rng, self.device)
        batch = move_data_to_device(deepcopy(batch), self.device)
        autocast = self.policy.compute_dtype if self.policy.mixed else None
        return output_in(self.root, batch, self.device, autocast=autocast, storage=self.policy.storage_dtype)

    @contextmanager
    def recorded(self, names: Iterable[str]) -> Generator[list[Call]]:
        """Within, record every call of the named modules, inner ones first."""
        calls, waiting = list[Call](), dict[str, Any]()

        def begins(name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
            # before the call, which may change them in place
            waiting[name] = map_tensors((args, kwargs), lambda tensor: tensor.detach().clone())

        def ends(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
            calls.append(Call(name, waiting.pop(name), {}))
            for index, tensor in enumerate(floating_in(output)):
                if tensor.requires_grad:
                    tensor.register_hook(partial(calls[-1].gradients.__setitem__, index))

        with ExitStack() as stack:
            for name in names:
                module = self.named[name]
                stack.callback(module.register_forward_pre_hook(partial(begins, name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(partial(ends, name)).remove)
            yield calls

    def passes(
        self,
        module: nn.Module,
        given: Any,
        gradients_of: Callable[[list[Tensor]], dict[int, Tensor]],
        watch: AbstractContextManager[Any] = NOTHING,
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Run one module and return its outputs, and the gradients of its inputs and parameters.

        ``given`` is (arguments, keywords). ``gradients_of(outputs)`` returns the gradients of some outputs, by index.
        """
        leaves: list[Tensor] = []

        def leaf(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point():
                tensor = tensor.detach().clone().requires_grad_()
                leaves.append(tensor)
            return tensor.clone()  # a leaf could not be changed in place

        args, kwargs = map_tensors(given, leaf)
        set_rng_state(self._rng, self.device)
        compute, storage = to_torch(self.policy.compute_dtype), to_torch(self.policy.storage_dtype)
        autocast = torch.autocast(self.device.type, compute, enabled=self.policy.mixed, cache_enabled=False)
        with watch:
            with autocast, default_dtype(storage):
                outputs = floating_in(module(*args, **kwargs))
            gradients, back = gradients_of(outputs), ()
            if gradients:
                ends = [outputs[at] for at in gradients]
                wanted = [*leaves, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
                cast_to_ends = [gradient.to(end.dtype) for gradient, end in zip(gradients.values(), ends, strict=True)]
                back = torch.autograd.grad(ends, wanted, cast_to_ends, allow_unused=True)
        return [output.detach() for output in outputs], list(back)


class _Search:
    """Runs copies of one module under changed policies, and compares their gradients with those in fp32."""

    def __init__(
        self, module: nn.Module, batches: list[Any], policy: PrecisionPolicy, rng: Any, tolerance: float, most: int
    ) -> None:
        self._module, self._batches, self._rng = module, batches, rng
        self._device, self._tolerance, self._most = next(module.parameters()).device, tolerance, most
        if policy.precision == "auto":
            policy = for_strategy.resolved(policy, describe(self._device), module)
        precision = "bf16-mixed" if policy.fp8 is not None else policy.precision
        self._given, self.policy = policy, replace(policy, precision=precision, fp8=None, checkpointing=None)
        #: the policies under which a finite loss has infinite gradients, at every scale of their rule
        self._stuck: set[PrecisionPolicy] = set()
        #: by policy, the lowest scale that its gradients needed to be finite
        self._needed: dict[PrecisionPolicy, float] = {}
        self._reference = PrecisionPolicy(precision="32-true")
        self._errors: dict[PrecisionPolicy, float | None] = {}
        self._exact = list(self._gradients(self._reference))
        for index, gradients in enumerate(self._exact):
            if not _finite(gradients.values()):
                what = f"batch {index}, whose gradients are not finite in fp32 either"
                raise PlanError.of(what, "look for the cause in it, or leave it out", "suggest_pins")

    def _copy(self, policy: PrecisionPolicy) -> PolicyCopy:
        return PolicyCopy(self._module, policy, self._device, self._rng)

    def _loss(self, copied: PolicyCopy, batch: Any) -> Tensor:
        loss: Any = loss_of(copied.run(batch))
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"{type(self._module).__name__} gave no scalar loss with a gradient"
            raise PlanError.of(what, "return the loss from training_step or forward", "suggest_pins")
        return loss.reshape(()).float()

    def _gradients(self, policy: PrecisionPolicy) -> Iterator[Gradients]:
        """Yield the unscaled gradients of each batch, in fp32.

        Under fp16 they come from the highest scale at which they are finite.
        """
        copied = self._copy(policy)
        named = {name: parameter for name, parameter in copied.root.named_parameters() if parameter.requires_grad}
        scales = [1.0] if policy.loss_scaling is None else _scales(policy.loss_scaling)
        for batch in self._batches:
            loss = self._loss(copied, batch)
            gradients, scale = Gradients(), 1.0
            for scale in scales:
                weights, again = [*named.values()], scale != scales[-1]
                raw: Any = torch.autograd.grad(loss * scale, weights, retain_graph=again, allow_unused=True)
                pairs = zip(named, raw, strict=True)
                gradients = {name: gradient.float() / scale for name, gradient in pairs if gradient is not None}
                if _finite(gradients.values()):
                    break
            else:
                self._stuck |= {policy} if bool(loss.isfinite()) else set()
            self._needed[policy] = min(self._needed.get(policy, scale), scale)
            yield gradients

    def error(self, policy: PrecisionPolicy, *, raises: bool = False) -> float | None:
        """Return the error of the gradients under a policy, from 0 to 1. Errors are kept.

        ``None`` if the module does not run under it; with ``raises`` the module's exception instead.
        """
        if policy not in self._errors:
            try:
                self._errors[policy] = _distance(self._exact, self._gradients(policy))
            except Exception:
                if raises:
                    raise
                self._errors[policy] = None
        return self._errors[policy]

    def _own_errors(self, policy: PrecisionPolicy, *, back: bool) -> dict[str, float]:
        """Return by name the largest error that a module adds, in its outputs or, with ``back``, in gradients."""
        errors: dict[str, float] = {}
        for batch in self._batches[:2]:
            exact, planned = self._copy(self._reference), self._copy(policy)
            parts = planned.named.items()
            wanted = [name for name, part in parts if name and (policy.fp8 is None or is_converted(part))]
            for call in self._calls(exact, batch, wanted, back=back):
                try:
                    error = self._own_error(exact, planned, call)
                except Exception:  # the module cannot be called alone, or with rounded inputs
                    error = 0.0
                errors[call.name] = max(errors.get(call.name, 0.0), error)
        return errors

    def _calls(self, exact: PolicyCopy, batch: Any, wanted: Sequence[str], *, back: bool) -> list[Call]:
        """Return every call of the named modules in a step in fp32; with ``back`` their gradients too."""
        with exact.recorded(wanted) as calls:
            loss = self._loss(exact, batch)
        if back:
            weights = [parameter for parameter in exact.root.parameters() if parameter.requires_grad]
            torch.autograd.grad(loss, weights, allow_unused=True)
        return calls

    def _own_error(self, exact: PolicyCopy, planned: PolicyCopy, call: Call) -> float:
        policy, roundoff = planned.policy, ROUNDOFF[planned.policy.compute_dtype]
        scale, half = self._needed[policy], to_torch(policy.compute_dtype)
        rounded = {at: (gradient * scale).to(half) for at, gradient in call.gradients.items()}
        rounded = rounded if _finite(rounded.values()) else {}
        given = cast_floating(call.given, half)
        ours, gradients = planned.passes(planned.named[call.name], given, lambda _: rounded)
        given = cast_floating(given, torch.float32)
        theirs, exact_gradients = exact.passes(exact.named[call.name], given, lambda _: rounded)
        known = [(a, b) for a, b in zip(gradients, exact_gradients, strict=True) if a is not None and b is not None]
        least = ROUNDING_ALONE * max((b.norm().item() for _, b in known), default=0.0)
        back = [_relative(a, b) for a, b in known if b.norm().item() > least]
        outputs = list(zip(ours, theirs, strict=True))
        if policy.fp8 is not None:
            return max([*back, *(_relative_rows(*pair) for pair in outputs)], default=0.0)
        if call.gradients:
            return max(back, default=0.0) / roundoff**0.5
        return max((_relative(*pair) / roundoff for pair in outputs), default=0.0)

    def advice(self) -> PinAdvice:
        """Return the advice: pins and layers to leave out of FP8, each with its errors, or a loss scale."""
        before = cast("float", self.error(self.policy, raises=True))
        rows: list[PinRow] = []
        if before > max(LEAST, ORDINARY * ROUNDOFF[self.policy.compute_dtype]):
            rows = self._pins(back=False) or self._pins(back=True)
        after = self.error(_pinned(self.policy, [row.pattern for row in rows]))
        scale = None if rows else self._scale(before)
        advice = PinAdvice(rows, before, before if after is None else after, self._given, scale=scale)
        return advice if self._given.fp8 is None else self._without_fp8(advice)

    def _pins(self, *, back: bool) -> list[PinRow]:
        rows = self._rows(self.policy, partial(_pinned, self.policy), back=back)
        share = SHARE_BACK if back and self.policy not in self._stuck else SHARE
        covered, whole = sum(row.params for row in rows), sum(one.numel() for one in self._module.parameters())
        return rows if covered <= share * whole else []

    def _scale(self, before: float) -> float | None:
        """Return the highest tried scale that at least halves the error ``before``.

        The tried scales are ``LOWER`` steps of 1/16 below the lowest scale of the rule. The module
        runs under each until one helps. The result is ``None`` if none does, or without a rule. It
        is ``None`` too unless a batch with a finite loss overflowed at every scale of the rule.
        """
        rule = self.policy.loss_scaling
        if rule is None or self.policy not in self._stuck:
            return None
        for power in range(1, LOWER + 1):
            scale = _scales(rule)[-1] / 16**power
            error = self.error(replace(self.policy, loss_scaling=LossScaling.static(scale)))
            if error is not None and error <= before / 2:
                return scale
        return None

    def _without_fp8(self, advice: PinAdvice) -> PinAdvice:
        """Return the advice with the layers to leave out of FP8, measured under its other suggestions."""
        policy = replace(advice.suggested(), checkpointing=None)
        rule = cast("FP8", policy.fp8)
        rule = replace(rule, emulate=rule.emulate or self._device.type != "cuda")

        def skipping(names: Sequence[str]) -> PrecisionPolicy:
            return replace(policy, fp8=replace(rule, skip=(*rule.skip, *names)))

        before = cast("float", self.error(skipping(()), raises=True))
        rows = self._rows(skipping(()), skipping, back=True)
        after = self.error(skipping([row.pattern for row in rows]))
        return replace(advice, fp8_rows=tuple(rows), fp8_errors=(before, before if after is None else after))

    def _rows(
        self, policy: PrecisionPolicy, changed: Callable[[Sequence[str]], PrecisionPolicy], *, back: bool
    ) -> list[PinRow]:
        """Return the harmful patterns, most harmful first. Patterns that gain little are left out.

        An empty list if all of them together do not halve the error. ``changed(patterns)`` returns the policy with
        them.
        """
        in_fp8, own = policy.fp8 is not None, self._own_errors(policy, back=back)
        flagged = {name: error for name, error in own.items() if error > (HARMFUL_FP8 if in_fp8 else HARMFUL)}
        innermost = [name for name in flagged if not any(other.startswith(f"{name}.") for other in flagged)]
        named = [(name, module) for name, module in named_submodules(self._module) if not in_fp8 or name in own]
        patterns = _patterns(sorted(innermost, key=lambda name: -flagged[name]), named, by_class=not in_fp8)
        kept = [pattern for pattern in patterns[:TRIED] if self.error(changed([pattern])) is not None]
        # All together first, because pinning one head alone does not help if two heads overflow.
        before, best = self.error(policy), self.error(changed(kept))
        if not kept or before is None or best is None or best > before / 2:
            return []
        for pattern in kept[::-1]:
            fewer = [other for other in kept if other != pattern]
            error = self.error(changed(fewer))
            if error is not None and error <= best + self._tolerance * (before - best):
                kept = fewer
        rows: list[PinRow] = []
        for pattern in kept:
            covered = [module for name, module in named_submodules(self._module) if matches(pattern, name, module)]
            below = {id(module): module for root in covered for module in root.modules()}
            owners = [module for module in below.values() if next(module.parameters(recurse=False), None) is not None]
            params = sum(parameter.numel() for parameter in nn.ModuleList(covered).parameters())
            others = [other for other in kept if other != pattern]
            errors = (self.error(changed(names)) for names in (others, kept))
            without, with_it = (1.0 if error is None else error for error in errors)
            dtype = "bf16" if in_fp8 else "fp32"
            rows.append(PinRow(pattern, dtype, len(owners or covered), without, with_it, params))
        return sorted(rows, key=lambda row: row.error_before, reverse=True)[: self._most]


def _scales(rule: LossScaling) -> list[float]:
    """Return scales that the rule can fall to, highest first: each a sixteenth of the last, and the floor."""
    floor = max(rule.floor, 2.0**-40)
    return [*(scale for power in range(40) if (scale := rule.init_scale / 16**power) > floor), floor]


def _pinned(policy: PrecisionPolicy, patterns: Iterable[str]) -> PrecisionPolicy:
    return replace(policy, pins=(*(Pin(pattern, "fp32") for pattern in patterns), *policy.pins))


def _finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _distance(exact: Sequence[Gradients], measured: Iterable[Gradients]) -> float:
    """Return the root mean square of the relative differences, each 1 at most.

    Gradients that consist of rounding are left out. Without any gradient it is 0.
    """
    squares: list[float] = []
    for theirs, ours in zip(exact, measured, strict=True):
        norms = {name: gradient.norm().item() for name, gradient in theirs.items()}
        known = [norm for norm in norms.values() if 0 < norm < float("inf")]
        least = ROUNDING_ALONE * median_high(known) if known else float("inf")
        compared = [name for name, norm in norms.items() if least <= norm < float("inf")]
        errors = (_relative(ours[name], theirs[name]) if name in ours else 1.0 for name in compared)
        squares += [min(1.0, error) ** 2 for error in errors]
    return (sum(squares) / len(squares)) ** 0.5 if squares else 0.0


def _relative(ours: Tensor, theirs: Tensor) -> float:
    """Return the norm of the difference relative to the norm of ``theirs``.

    Entries that are not finite in ``theirs`` are left out. It is infinite if another entry of ``ours`` is not finite,
    and 0 if the shapes differ or ``theirs`` is 0.
    """
    if ours.shape != theirs.shape:
        return 0.0
    known = theirs.isfinite()
    ours, theirs = ours.float()[known], theirs.float()[known]
    if not _finite([ours]):
        return float("inf")
    scale = theirs.norm().item()
    return (ours - theirs).norm().item() / scale if scale else 0.0


def _relative_rows(ours: Tensor, theirs: Tensor) -> float:
    """Return the root mean square of the relative differences of rows, each 1 at most; zero rows are left out."""
    ours, theirs = (tensor.float().reshape(-1, tensor.shape[-1]) for tensor in (ours, theirs))
    norms = theirs.norm(dim=1)
    errors = ((ours - theirs).norm(dim=1) / norms)[norms > 0].nan_to_num(1.0, 1.0).clamp(max=1.0)
    return errors.square().mean().sqrt().item() if errors.numel() else 0.0


def _patterns(harmful: Sequence[str], named: Sequence[tuple[str, nn.Module]], *, by_class: bool) -> list[str]:
    """Return patterns for the harmful names, in their order.

    A class, or the last part of a name, stands for all its modules if most of them are harmful (``KIND``).
    """
    classes = {name: original_class(module).__name__ for name, module in named if has_own_forward(module)}

    def pattern(name: str) -> str:
        last = name.rpartition(".")[2]
        for word in (classes[name], last) if by_class else (last,):
            same = [other for other in classes if word in (classes[other], other.rpartition(".")[2])]
            several = len(same) > 1 and not word.isdigit()
            if several and sum(other in harmful for other in same) >= KIND * len(same):
                return word
        return name

    return list(dict.fromkeys(map(pattern, harmful)))
