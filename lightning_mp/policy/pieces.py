"""The pieces of a policy: pins, checkpointing, FP8 products, non-finite steps, and how the loss scale moves."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, cast

from lightning_mp.errors import Faults, did_you_mean, is_number
from lightning_mp.policy.words import DTYPES

STORAGE_DTYPES = ("fp32", "bf16", "fp16")
#: torchao's recipes, by the words a plan has for them
RECIPES = ("rowwise", "tensorwise", "rowwise_gw_hp", "mxfp8", "mxfp8_gw_hp")
# torch.amp.GradScaler's defaults, https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
TORCH_INIT_SCALE = 2.0**16
TORCH_GROWTH_INTERVAL = 2000
FP32_MAX = 3.4028234663852886e38
_BOOLEAN = ((True, False), "write a boolean, without quotes")


def expression(self: Any) -> str:
    """``Name(field=value)`` with the fields that are not at their defaults; a dataclass's ``__repr__``."""
    values = {item.name: (getattr(self, item.name), item.default) for item in fields(self)}
    given = {name: value for name, (value, default) in values.items() if default is MISSING or value != default}
    return call(type(self).__name__, given)


def call(name: str, arguments: dict[str, Any], *positional: Any) -> str:
    """A call of ``name`` as Python reads it."""
    keywords = [f"{key}={_value(value)}" for key, value in arguments.items()]
    return f"{name}({', '.join([*map(_value, positional), *keywords])})"


def _value(value: Any) -> str:
    return "float('inf')" if value == math.inf else repr(value)


def storage_dtype(value: object, what: str, faults: Faults, others: tuple[str, ...] = ()) -> str:
    """The short name of a format to store weights in, from any spelling of it (``"bfloat16"``, ``torch.bfloat16``, …).

    Anything else is noted in ``faults`` as ``what``; ``others`` are further words allowed there.
    """
    text = str(value).lower().removeprefix("torch.")
    name, allowed = DTYPES.get(text), STORAGE_DTYPES + others
    if name in STORAGE_DTYPES:
        return name
    known = [alias for alias, dtype in DTYPES.items() if dtype in STORAGE_DTYPES]
    if "16" in text:  # bf16 is offered to nobody who wrote fp16
        known = [alias for alias in known if alias.startswith("b") == text.startswith("b")]
    fix = f"{name} is no storage format: write fp32" if name else did_you_mean(text, [*known, *others])
    faults.add(f"{what}={value!r}", ", ".join(allowed), fix)
    return str(value)


def normalise(instance: object, **values: object) -> None:
    """Set fields of a frozen dataclass while it is being built."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)


def _several(name: str, value: object, faults: Faults, allowed: str, fix: str) -> tuple[str, ...]:
    """One text or several, as a tuple; anything else is noted. A class is its name."""
    several = isinstance(value, Iterable) and not isinstance(value, (str, type, dict))
    items: list[Any] = list(cast("Iterable[Any]", value)) if several else [value]
    found = tuple(item.__name__ if isinstance(item, type) else item for item in items)
    if not all(isinstance(item, str) and item for item in found):
        faults.add(f"{name}={value!r}", allowed, fix)
    return found


@dataclass(frozen=True, slots=True)
class Pin:
    """One module-level dtype: every module that ``pattern`` covers is stored and run in ``dtype``.

    Args:
        pattern: an fnmatch against a module's name, any dotted suffix of it, or its class.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        output: the dtype of what the module returns: ``None`` for the mode's rule (its own dtype under the mixed
            modes, the dtype that came in under the true modes), ``"pin"``, ``"input"``, or a dtype.
    """

    pattern: str
    dtype: str
    output: str | None = None

    __repr__ = expression

    def __post_init__(self) -> None:
        pattern: object = self.pattern
        name = f"pin {pattern!r}"
        with Faults("Pin") as faults:
            if not isinstance(pattern, str) or not pattern:
                fix = "write a pattern: '*norm*' covers every norm by name"
                faults.add(f"pattern={pattern!r}", "a non-empty fnmatch pattern", fix)
            normalise(self, dtype=storage_dtype(self.dtype, f"{name}: dtype", faults))
            if self.output not in (None, "pin", "input"):
                normalise(self, output=storage_dtype(self.output, f"{name}: output", faults, ("pin", "input")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointing:
    """Which modules recompute their activations in the backward pass instead of storing them.

    Args:
        modules: a pattern as in :class:`Pin`, a module class, or several; of nested matches the outermost counts.
        mode: ``"full"`` recomputes everything; ``"selective"`` keeps the outputs of ``save_ops``.
        every: of the matches, only every n-th is checkpointed.
        save_ops: names of aten operators, ``"mm"`` or ``"aten.mm.default"``; ``None``: matrix products and attention.
        preserve_rng: whether the recomputation draws the random numbers that the first pass drew.
    """

    modules: str | tuple[str, ...]
    mode: Literal["full", "selective"] = "full"
    every: int = 1
    save_ops: tuple[str, ...] | None = None
    preserve_rng: bool = True

    __repr__ = expression

    def __post_init__(self) -> None:
        with Faults("Checkpointing") as faults:
            allowed, fix = "a pattern, a module class, or several", "write modules='*.h.*'"
            names, save_ops = _several("modules", self.modules, faults, allowed, fix), self.save_ops
            if not names:
                faults.add(f"modules={self.modules!r}", allowed, fix)
            faults.one_of("mode", self.mode, ("full", "selective"), "write 'full' to recompute everything")
            faults.whole("every", self.every, 1, "write 2 to checkpoint every second module")
            if save_ops is not None:
                operators = "names of aten operators", "save_ops=('mm', 'addmm')"
                save_ops = _several("save_ops", save_ops, faults, *operators)
                if self.mode == "full":
                    faults.add("save_ops with mode='full'", "save_ops with mode='selective'", "set mode='selective'")
            faults.one_of("preserve_rng", self.preserve_rng, *_BOOLEAN)
        normalise(self, modules=names[0] if len(names) == 1 else names, save_ops=save_ops)

    @property
    def patterns(self) -> tuple[str, ...]:
        """``modules`` as a tuple."""
        return (self.modules,) if isinstance(self.modules, str) else self.modules


@dataclass(frozen=True, kw_only=True, slots=True)
class FP8:
    """The rule of the FP8 products of ``"fp8-mixed"``: which linear layers, with which scales, and when.

    Args:
        recipe: ``"rowwise"`` gives each row a scale of its own, so that no token changes another's and an inf stays in
            its row; ``"tensorwise"`` one scale a tensor; ``"rowwise_gw_hp"`` is rowwise with the weights' gradients
            in bf16. ``"mxfp8"`` gives each 32 numbers of a row a power of two as scale (OCP Microscaling Formats 1.0):
            Blackwell multiplies so, elsewhere it is emulated. ``"mxfp8_gw_hp"`` has the weights' gradients in bf16.
        modules: the layers that may be converted; a pattern as in :class:`Pin`, or several.
        skip: the layers that are left in bf16; as ``modules``.
        all_gather: FSDP2 gathers converted weights in FP8 (``"tensorwise"`` alone).
        evaluate: what validation, test and prediction run in: ``"bf16"``, or ``"fp8"`` as training.
        emulate: compute the products in fp32 from the rounded numbers, where the device has no FP8 units.
        small: ``"skip"`` leaves layers too small to pay for the recipe in bf16, ``"convert"`` converts them too.

    Raises:
        PlanError: every bad value at once.
    """

    recipe: Literal["rowwise", "tensorwise", "rowwise_gw_hp", "mxfp8", "mxfp8_gw_hp"] = "rowwise"
    modules: str | tuple[str, ...] = "*"
    skip: str | tuple[str, ...] = ("lm_head",)
    all_gather: bool = False
    evaluate: Literal["bf16", "fp8"] = "bf16"
    emulate: bool = False
    small: Literal["skip", "convert"] = "skip"

    __repr__ = expression

    def __post_init__(self) -> None:
        with Faults("FP8") as faults:
            faults.one_of("recipe", self.recipe, RECIPES, did_you_mean(str(self.recipe), RECIPES, "write 'rowwise'"))
            allowed = "a non-empty fnmatch pattern, or several"
            modules = _several("modules", self.modules, faults, allowed, "write modules='*'")
            if modules == ():
                faults.add("modules=(), which converts nothing", "a pattern, or several", "write modules='*'")
            skip = _several("skip", self.skip, faults, allowed, "write skip=('lm_head',)")
            normalise(self, modules=modules[0] if len(modules) == 1 else modules, skip=skip)
            for name in ("all_gather", "emulate"):
                faults.one_of(name, getattr(self, name), *_BOOLEAN)
            faults.one_of("evaluate", self.evaluate, ("bf16", "fp8"), "write 'bf16', the default")
            faults.one_of("small", self.small, ("skip", "convert"), "write 'convert' to convert small layers too")
            if self.all_gather is True and self.recipe in RECIPES and self.recipe != "tensorwise":
                faults.add(
                    f"all_gather=True with recipe={self.recipe!r}, whose scales belong to rows of the whole weight",
                    "all_gather=True with recipe='tensorwise'",
                    "leave all_gather out, or write recipe='tensorwise'",
                )

    @property
    def blocks(self) -> bool:
        """Whether blocks of 32 numbers have a scale each."""
        return self.recipe.startswith("mxfp8")

    @property
    def anywhere(self) -> bool:
        """Whether it runs on a device without FP8 units too, emulated: MXFP8 does so of its own accord."""
        return self.emulate or self.blocks

    @property
    def multiple(self) -> int:
        """What a dimension of a product is a multiple of: 16 (``torch._scaled_mm`` on CUDA), or a block."""
        return 32 if self.blocks else 16

    @property
    def patterns(self) -> tuple[str, ...]:
        """``modules`` as a tuple."""
        return (self.modules,) if isinstance(self.modules, str) else self.modules


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFinite:
    """What happens to a step whose gradients are not finite.

    With loss scaling an overflow is ordinary: only skips at the scale's floor count, and ``"ignore"`` still skips.

    Args:
        action: ``"skip"`` leaves it out, up to a budget; ``"raise"`` stops at the first; ``"ignore"`` applies it, as
            stock Lightning does.
        max_consecutive: how many in a row ``"skip"`` leaves out.
        on_budget: what one more leads to: ``"raise"`` ends the run, ``"rewind"`` loads the newest checkpoint of the
            Trainer's ``ModelCheckpoint`` whose weights are finite and continues after the bad batch.
        save_batch: save the batch of a skipped step, and the state of the random number generators before its forward,
            for :func:`~lightning_mp.callbacks.replay_saved`; at most 10 steps a run. It costs a host read a step.
        run_dir: the folder for ``nonfinite/*.pt`` and ``events.jsonl``; by default one of the run's own.
    """

    action: Literal["skip", "raise", "ignore"] = "skip"
    max_consecutive: int = 100
    on_budget: Literal["raise", "rewind"] = "raise"
    save_batch: bool = False
    run_dir: str | None = None

    __repr__ = expression

    def __post_init__(self) -> None:
        with Faults("NonFinite") as faults:
            faults.one_of("nonfinite", self.action, ("skip", "raise", "ignore"), "write 'skip', the default")
            faults.whole("max_consecutive", self.max_consecutive, 0, "write 100, the default")
            faults.one_of("on_budget", self.on_budget, ("raise", "rewind"), "write 'raise', the default")
            faults.one_of("save_batch", self.save_batch, *_BOOLEAN)
            if self.run_dir is not None and not isinstance(cast("object", self.run_dir), (str, os.PathLike)):
                faults.add(f"run_dir={self.run_dir!r}", "a path", "leave it out for a folder of the run's own")
                return
            if self.action != "skip" and self.on_budget == "rewind":
                faults.add(
                    f"on_budget='rewind' with action={self.action!r}", "a budget of skips", "write action='skip'"
                )
            if self.action == "ignore" and self.save_batch:
                faults.add("save_batch=True with action='ignore'", "steps that are skipped", "write action='skip'")
        if self.run_dir is not None:
            normalise(self, run_dir=os.fspath(self.run_dir))

    @property
    def watches(self) -> bool:
        """Whether batches have to be kept until their step is over."""
        return self.save_batch or self.on_budget == "rewind"


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaling:
    """How the loss scale of the fp16 modes moves.

    A clean step is one whose gradients are all finite. After ``growth_interval`` clean steps the scale is multiplied
    by ``growth_factor``; after ``hysteresis`` overflows it is multiplied by ``backoff_factor``, never below
    ``min_scale`` nor above ``max_scale``. Alone, ``LossScaling()`` is torch's rule with a floor of 1 that is held.

    Args:
        init_scale: the scale of the first step.
        growth_factor: what the scale is multiplied by when it grows.
        backoff_factor: what the scale is multiplied by when it backs off.
        growth_interval: clean steps before the scale grows.
        growth_delay: clean steps added before the *first* growth at the start and after an overflow (DeepSpeed: 1).
        hysteresis: overflows before the scale backs off.
        consecutive_hysteresis: whether any clean step refills the hysteresis, or only a growth does.
        min_scale: the scale never falls below it.
        max_scale: ``None``: growth that would overflow fp32 is left out, as torch does; ``inf``: no ceiling.
        at_min: what an overflow at ``min_scale`` does: ``"hold"`` skips the step, ``"raise"`` raises LossScaleError.
        dynamic: ``False``: the scale never moves.

    Raises:
        PlanError: a value out of its range; every such value is named.
    """

    init_scale: float = TORCH_INIT_SCALE
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = TORCH_GROWTH_INTERVAL
    growth_delay: int = 0
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0
    max_scale: float | None = None
    at_min: Literal["hold", "raise"] = "hold"
    dynamic: bool = True

    __repr__ = expression

    def __post_init__(self) -> None:
        with Faults("LossScaling") as faults:
            self._check_numbers(faults)
            self._check_bounds(faults)
            for name in ("dynamic", "consecutive_hysteresis"):
                faults.one_of(name, getattr(self, name), (True, False), "write a boolean, without quotes")
            faults.one_of(
                "at_min", self.at_min, ("hold", "raise"), "write 'hold' to skip the step at min_scale, or 'raise'"
            )

    def _check_numbers(self, faults: Faults) -> None:
        for name, (fits, allowed, fix) in _RANGES.items():
            if not fits(getattr(self, name)):
                faults.add(f"{name}={getattr(self, name)!r}", allowed, fix)
        for name, least in (("growth_interval", 1), ("growth_delay", 0), ("hysteresis", 1)):
            faults.whole(name, getattr(self, name), least, f"write a number of steps, at least {least}")

    def _check_bounds(self, faults: Faults) -> None:
        wrong = {fault.given.partition("=")[0] for fault in faults.found}
        if wrong & {"min_scale", "max_scale"}:
            return
        least, most, allowed = self.min_scale, math.inf if self.max_scale is None else self.max_scale, "min_scale <= "
        given = f"min_scale={least!r}, max_scale={self.max_scale!r}"
        if least > most:
            faults.add(given.replace(",", " above"), f"{allowed}max_scale", "swap them, or leave max_scale out")
        elif self.dynamic and "init_scale" not in wrong and not least <= self.init_scale <= most:
            given, fix = f"init_scale={self.init_scale!r} with {given}", "move init_scale between the bounds"
            faults.add(given, f"{allowed}init_scale <= max_scale", fix)

    @property
    def floor(self) -> float:
        """The scale below which the rule does not go."""
        return self.min_scale if self.dynamic else self.init_scale

    @classmethod
    def torch(
        cls,
        init_scale: float = TORCH_INIT_SCALE,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = TORCH_GROWTH_INTERVAL,
    ) -> LossScaling:
        """``torch.amp.GradScaler``'s sequence: no floor, and fp32's own overflow as the ceiling."""
        return cls(
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            min_scale=0.0,
        )

    @classmethod
    def deepspeed(
        cls,
        loss_scale: float = 0,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_loss_scale: float = 1,
        at_min: Literal["hold", "raise"] = "raise",
    ) -> LossScaling:
        """``deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler``'s sequence, from DeepSpeed's own JSON keys.

        ``loss_scale > 0`` is a static scale, as in DeepSpeed. It grows first after ``loss_scale_window + 1`` clean
        steps, at the start and after an overflow, then every ``loss_scale_window``.
        """
        if is_number(loss_scale) and loss_scale > 0:
            return cls.static(loss_scale)
        power = initial_scale_power
        with Faults("LossScaling.deepspeed") as faults:
            if loss_scale != 0 or isinstance(loss_scale, bool):
                faults.add(f"loss_scale={loss_scale!r}", "0 (dynamic) or a number > 0 (static)", "write 0")
            if not is_number(power) or not -126 <= power <= 127:
                faults.add(f"initial_scale_power={power!r}", "a number from -126 to 127", "write 16 for 65536")
        return cls(
            init_scale=2.0**initial_scale_power,
            growth_interval=loss_scale_window,
            growth_delay=1,
            hysteresis=hysteresis,
            consecutive_hysteresis=consecutive_hysteresis,
            min_scale=min_loss_scale,
            max_scale=math.inf,
            at_min=at_min,
        )

    @classmethod
    def megatron(
        cls,
        initial_scale: float = 2.0**32,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
    ) -> LossScaling:
        """Megatron-LM's ``DynamicGradScaler`` sequence, with the defaults of its command line."""
        return cls(
            init_scale=initial_scale,
            growth_factor=_fp32(growth_factor),  # Megatron keeps its factors in fp32 tensors
            backoff_factor=_fp32(backoff_factor),
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=math.inf,
        )

    @classmethod
    def static(cls, scale: float) -> LossScaling:
        """A scale that never moves; overflowing steps are still skipped."""
        return cls(init_scale=scale, min_scale=0.0, dynamic=False)


def _fp32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0] if is_number(value) and abs(value) <= FP32_MAX else value


_MOVES = "use {}, or dynamic=False for a scale that stays"
#: the fields that are numbers: whether one is in its range, how a message says that, and what to write instead
_RANGES: Mapping[str, tuple[Callable[[Any], bool], str, str]] = {
    "init_scale": (
        lambda value: is_number(value) and 2.0**-149 <= value <= FP32_MAX,
        "a finite number > 0 that fp32 can hold",
        "leave it out for the default, 65536",
    ),
    "growth_factor": (lambda value: is_number(value) and value > 1, "a finite number > 1", _MOVES.format(2.0)),
    "backoff_factor": (
        lambda value: is_number(value) and 0 < value < 1,
        "a number between 0 and 1, both left out",
        _MOVES.format(0.5),
    ),
    "min_scale": (lambda value: is_number(value) and value >= 0, "a finite number >= 0", "write 1, the default"),
    "max_scale": (
        lambda value: value is None or value == math.inf or (is_number(value) and value > 0),
        "None or a number > 0",
        "leave it out for torch's own ceiling",
    ),
}
