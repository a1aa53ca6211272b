"""The pieces of a policy: pins, checkpointing, FP8 products, non-finite steps, the rule of the loss scale."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from lightning_mp.errors import Faults, did_you_mean, is_number, is_whole

STORAGE_DTYPES = ("fp32", "bf16", "fp16")
_SPELLINGS = {
    "fp32": ("float32", "float", "32"),
    "tf32": ("tensorfloat32",),
    "bf16": ("bfloat16",),
    "fp16": ("float16", "half", "16"),
    "fp8": ("float8",),
}
#: every spelling of a format, and its name
DTYPES = {alias: name for name, aliases in _SPELLINGS.items() for alias in (name, *aliases)}
# torch.amp.GradScaler's defaults, https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
TORCH_INIT_SCALE = 2.0**16
TORCH_GROWTH_INTERVAL = 2000
FP32_MAX = 3.4028234663852886e38


def call(name: str, arguments: dict[str, Any], *positional: Any) -> str:
    """Return a call of ``name`` as Python source."""
    keywords = [f"{key}={_value(value)}" for key, value in arguments.items()]
    return f"{name}({', '.join([*map(_value, positional), *keywords])})"


def _value(value: Any) -> str:
    return "float('inf')" if value == math.inf else repr(value)


def storage_dtype(value: object, what: str, faults: Faults, others: tuple[str, ...] = ()) -> str:
    """Return the short name of a storage format, such as ``bf16`` for ``torch.bfloat16``, or a word of ``others``.

    For any other value a fault is added, and its text is returned. ``what`` names the field in the message.
    """
    text = str(value).lower().removeprefix("torch.")
    name, allowed = DTYPES.get(text), STORAGE_DTYPES + others
    if name in STORAGE_DTYPES:
        return name
    known = [alias for alias, dtype in DTYPES.items() if dtype in STORAGE_DTYPES]
    if "16" in text:  # bf16 is offered to nobody who wrote fp16
        known = [alias for alias in known if alias.startswith("b") == text.startswith("b")]
    fix = f"{name} is no storage format: write fp32" if name else did_you_mean(text, [*known, *others])
    faults.add(f"{what}={value!r}", allowed=", ".join(allowed), fix=fix)
    return str(value)


def normalise(instance: object, **values: object) -> None:
    """Set fields of a frozen dataclass within its ``__post_init__``."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)


def _checked(default: Any, allowed: str, holds: Callable[[Any], bool]) -> Any:
    """Return a field that takes the values for which ``holds`` is True. ``allowed`` describes them in a message."""
    return field(default=default, metadata={"allowed": allowed, "holds": holds})


def _number(default: float, allowed: str, holds: Callable[[float], bool]) -> Any:
    return _checked(default, allowed, lambda value: is_number(value) and holds(value))


def _whole(default: int, least: int) -> Any:
    return _checked(default, f"a whole number >= {least}", lambda value: is_whole(value) and value >= least)


def _several(default: Any, allowed: str, example: str) -> Any:
    """Return a field of one text or several. ``allowed`` describes a text, ``example`` is shown in the fix."""
    return field(default=default, metadata={"several": allowed, "example": example})


def _patterns(default: Any = MISSING) -> Any:
    return _several(default, "a pattern, a module class, or several", "'*.h.*'")


@cache
def _choices(cls: type[Any]) -> dict[str, tuple[Any, ...]]:
    """Return the allowed values of each field that is a boolean or a ``Literal``."""
    hints = {name: hint for name, hint in get_type_hints(cls).items() if hint is bool or get_origin(hint) is Literal}
    return {name: get_args(hint) or (True, False) for name, hint in hints.items()}


class _Piece:
    """The base of every piece: all fields are checked together, and ``repr`` leaves out defaults."""

    __slots__ = ()

    def __post_init__(self) -> None:
        with Faults(type(self).__name__) as faults:
            for item in fields(cast("Any", self)):
                self._check(item, getattr(self, item.name), faults)
            for given, fix in () if faults.found else self._contradictions():
                faults.add(given, fix=fix)

    def _check(self, item: Any, value: Any, faults: Faults) -> None:
        rule, choices = item.metadata, _choices(type(self)).get(item.name, ())
        default = f"write {item.default!r}, the default"
        if "several" in rule:
            self._take_several(item, value, faults)
        elif choices:
            boolean = "write a boolean, without quotes" if True in choices else ""
            fix = boolean or did_you_mean(str(value), choices, default)
            faults.one_of(rule.get("written", item.name), value, choices, fix)
        elif "holds" in rule and not rule["holds"](value):
            faults.add(f"{item.name}={value!r}", allowed=rule["allowed"], fix=default)

    def _take_several(self, item: Any, value: Any, faults: Faults) -> None:
        """Set a field of several texts. A class becomes its name; a single pattern of ``modules`` stays a text."""
        if value is None and item.default is None:
            return
        several = isinstance(value, Iterable) and not isinstance(value, (str, type, dict))
        items: list[Any] = list(cast("Iterable[Any]", value)) if several else [value]
        texts = tuple(each.__name__ if isinstance(each, type) else each for each in items)
        selects = item.name == "modules"
        if not all(isinstance(text, str) and text for text in texts) or (selects and not texts):
            fix = f"write {item.name}={item.metadata['example']}"
            faults.add(f"{item.name}={value!r}", allowed=item.metadata["several"], fix=fix)
        normalise(self, **{item.name: texts[0] if selects and len(texts) == 1 else texts})

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield (problem, fix) for fields that are valid alone and contradict each other."""
        return iter(())

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return the patterns of ``modules`` as a tuple."""
        modules: str | tuple[str, ...] = cast("Any", self).modules
        return (modules,) if isinstance(modules, str) else modules

    def __repr__(self) -> str:
        values = {item.name: (getattr(self, item.name), item.default) for item in fields(cast("Any", self))}
        given = {name: value for name, (value, default) in values.items() if default is MISSING or value != default}
        return call(type(self).__name__, given)


@dataclass(frozen=True, slots=True, repr=False)
class Pin(_Piece):
    """One module-level dtype: every module that ``pattern`` covers is stored and run in ``dtype``.

    Args:
        pattern: an fnmatch against a module's name, any dotted suffix of it, or its class.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        output: the dtype of the module's output: a dtype, ``"pin"`` for the pin's, or ``"input"`` for the input's.
            ``None``: the pin's under the mixed modes, the input's under the true modes.
        accumulate: ``None``, or ``"fp32"`` for Linear layers in a half ``dtype``. Their operands are cast to
            ``dtype``, the sum and the output are fp32. Gradients equal those of a product in ``dtype``. Weights
            are stored in the mode's dtype.

    Raises:
        PlanError: every bad value at once.
    """

    pattern: str
    dtype: str
    output: str | None = None
    accumulate: str | None = None

    def __post_init__(self) -> None:
        with Faults("Pin") as faults:
            if not isinstance(self.pattern, str) or not self.pattern:  # pyright: ignore[reportUnnecessaryIsInstance]
                allowed = "a non-empty fnmatch pattern, as '*norm*'"
                faults.add(f"pattern={self.pattern!r}", allowed=allowed, fix="write '*norm*' for every norm by name")
            name = f"pin {self.pattern!r}"
            normalise(self, dtype=storage_dtype(self.dtype, f"{name}: dtype", faults))
            if self.output not in (None, "pin", "input"):
                normalise(self, output=storage_dtype(self.output, f"{name}: output", faults, ("pin", "input")))
            if self.accumulate is None:
                return
            normalise(self, accumulate=DTYPES.get(str(self.accumulate).removeprefix("torch."), self.accumulate))
            faults.one_of(f"{name}: accumulate", self.accumulate, ("fp32",), "write 'fp32', or leave it out")
            if self.dtype == "fp32":
                faults.add(f"{name}: accumulate with dtype='fp32'", fix="write 'bf16' or 'fp16', or leave it out")
            if self.output is not None:
                faults.add(f"{name}: accumulate with output={self.output!r}", fix="leave output out: it is fp32")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Checkpointing(_Piece):
    """Which modules recompute their activations in the backward pass instead of storing them.

    Args:
        modules: a pattern as in :class:`Pin`, a module class, or several. The outermost of nested matches counts.
        mode: ``"full"`` recomputes everything; ``"selective"`` keeps the outputs of ``save_ops``.
        every: checkpoint only every n-th match.
        save_ops: names of aten operators, ``"mm"`` or ``"aten.mm.default"``; ``None``: matrix products and attention.
        preserve_rng: draw the same random numbers in the recomputation as in the first pass.

    Raises:
        PlanError: every bad value at once.
    """

    modules: str | tuple[str, ...] = _patterns()
    mode: Literal["full", "selective"] = "full"
    every: int = _whole(1, least=1)
    save_ops: tuple[str, ...] | None = _several(None, "names of aten operators", "('mm', 'addmm')")
    preserve_rng: bool = True

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        if self.save_ops is not None and self.mode == "full":
            yield "save_ops with mode='full'", "set mode='selective'"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class FP8(_Piece):
    """The rule of the FP8 products of ``"fp8-mixed"``: which linear layers, with which scales, and when.

    Args:
        recipe: the scales. ``"rowwise"``: one for each row, so no token changes another's and an inf stays in its row.
            ``"tensorwise"``: one for each tensor. ``"rowwise_gw_hp"``: as rowwise, with the weights' gradients in bf16.
            ``"mxfp8"``: a power of two for each 32 numbers of a row (OCP Microscaling Formats 1.0). Blackwell GPUs
            multiply in it, other devices emulate it. ``"mxfp8_gw_hp"``: as mxfp8, weights' gradients in bf16.
        modules: the layers that may be converted; a pattern as in :class:`Pin`, or several.
        skip: the layers that stay in bf16; a pattern or several, as ``modules``.
        all_gather: FSDP2 gathers converted weights in FP8 (``"tensorwise"`` alone).
        evaluate: the format of products in validation, test and prediction: ``"bf16"``, or ``"fp8"``.
        emulate: compute the products in fp32 from the rounded numbers, for devices without FP8 units.
        small: ``"skip"`` keeps layers in bf16 that are too small to gain speed, ``"convert"`` converts them too.

    Raises:
        PlanError: every bad value at once.
    """

    recipe: Literal["rowwise", "tensorwise", "rowwise_gw_hp", "mxfp8", "mxfp8_gw_hp"] = "rowwise"
    modules: str | tuple[str, ...] = _patterns("*")
    skip: str | tuple[str, ...] = _several(("lm_head",), "a pattern, a module class, or several, or ()", "('lm_head',)")
    all_gather: bool = False
    evaluate: Literal["bf16", "fp8"] = "bf16"
    emulate: bool = False
    small: Literal["skip", "convert"] = "skip"

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        if self.all_gather and self.recipe != "tensorwise":
            given = f"all_gather=True with recipe={self.recipe!r}, whose scales belong to rows of the whole weight"
            yield given, "leave all_gather out, or write recipe='tensorwise'"

    @property
    def blocks(self) -> bool:
        """True if each block of 32 numbers has a scale."""
        return self.recipe.startswith("mxfp8")

    @property
    def anywhere(self) -> bool:
        """True if it also runs on a device without FP8 units. MXFP8 always does, emulated."""
        return self.emulate or self.blocks

    @property
    def multiple(self) -> int:
        """Return the number that must divide a product's dimensions: 16 (``torch._scaled_mm``), or a block's 32."""
        return 32 if self.blocks else 16


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class NonFinite(_Piece):
    """The treatment of a step whose gradients are not finite.

    With loss scaling an overflow is ordinary: only skips at the scale's floor count, and ``"ignore"`` still skips.

    Args:
        action: ``"skip"`` skips the step, up to a budget. ``"raise"`` ends the run at the first one. ``"ignore"``
            applies it, as stock Lightning does.
        max_consecutive: the budget: the number of consecutive skipped steps that ``"skip"`` allows.
        on_budget: the consequence of one more: ``"raise"`` ends the run, ``"rewind"`` loads the newest checkpoint of
            the Trainer's ``ModelCheckpoint`` whose weights are finite and continues after the bad batch.
        save_batch: save the batch of a skipped step, and the state of the random number generators before its forward,
            for :func:`~lightning_mp.callbacks.replay_saved`; at most 10 steps a run. It costs a host read a step.
        run_dir: the folder for ``nonfinite/*.pt`` and ``events.jsonl``; by default the run's folder.

    Raises:
        PlanError: every bad value at once.
    """

    #: a plan's argument ``nonfinite`` takes the word alone
    action: Literal["skip", "raise", "ignore"] = field(default="skip", metadata={"written": "nonfinite"})
    max_consecutive: int = _whole(100, least=0)
    on_budget: Literal["raise", "rewind"] = "raise"
    save_batch: bool = False
    run_dir: str | None = _checked(None, "a path", lambda value: value is None or isinstance(value, str))

    def __post_init__(self) -> None:
        if isinstance(self.run_dir, os.PathLike):
            normalise(self, run_dir=os.fspath(self.run_dir))
        _Piece.__post_init__(self)

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        if self.action != "skip" and self.on_budget == "rewind":
            yield f"on_budget='rewind' with action={self.action!r}, which has no budget", "write action='skip'"
        if self.action == "ignore" and self.save_batch:
            yield "save_batch=True with action='ignore', which skips no step", "write action='skip'"

    @property
    def watches(self) -> bool:
        """True if batches have to be kept until the end of their step."""
        return self.save_batch or self.on_budget == "rewind"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LossScaling(_Piece):
    """The rule of the loss scale of the fp16 modes.

    A clean step is one whose gradients are all finite. After ``growth_interval`` clean steps the scale is multiplied
    by ``growth_factor``; after ``hysteresis`` overflows it is multiplied by ``backoff_factor``, never below
    ``min_scale`` nor above ``max_scale``. ``LossScaling()`` is torch's rule with a floor of 1, at which it stays.

    Args:
        init_scale: the scale of the first step.
        growth_factor: the factor of a growth.
        backoff_factor: the factor of a backoff.
        growth_interval: clean steps before the scale grows.
        growth_delay: clean steps added before the *first* growth at the start and after an overflow (DeepSpeed: 1).
        hysteresis: overflows before the scale backs off.
        consecutive_hysteresis: ``True``: any clean step refills the hysteresis. ``False``: only a growth does.
        min_scale: the scale never falls below it.
        max_scale: the scale never rises above it. ``None``: growth beyond fp32 is left out, as in torch.
            ``inf``: no limit.
        at_min: the consequence of an overflow at ``min_scale``: ``"hold"`` skips the step, ``"raise"`` raises
            LossScaleError.
        dynamic: ``False``: the scale never moves.

    Raises:
        PlanError: a value out of its range; every such value is named.
    """

    init_scale: float = _number(
        TORCH_INIT_SCALE, "a finite number > 0 that fp32 can hold", lambda value: 2.0**-149 <= value <= FP32_MAX
    )
    growth_factor: float = _number(2.0, "a finite number > 1", lambda value: value > 1)
    backoff_factor: float = _number(0.5, "a number between 0 and 1, both left out", lambda value: 0 < value < 1)
    growth_interval: int = _whole(TORCH_GROWTH_INTERVAL, least=1)
    growth_delay: int = _whole(0, least=0)
    hysteresis: int = _whole(1, least=1)
    consecutive_hysteresis: bool = False
    min_scale: float = _number(1.0, "a finite number >= 0", lambda value: value >= 0)
    max_scale: float | None = _checked(
        None, "None or a number > 0", lambda value: value in (None, math.inf) or (is_number(value) and value > 0)
    )
    at_min: Literal["hold", "raise"] = "hold"
    dynamic: bool = True

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        least, most = self.min_scale, math.inf if self.max_scale is None else self.max_scale
        if least > most:
            yield f"min_scale={least!r} above max_scale={self.max_scale!r}", "swap them, or leave max_scale out"
        elif self.dynamic and not least <= self.init_scale <= most:
            given = f"init_scale={self.init_scale!r} with min_scale={least!r}, max_scale={self.max_scale!r}"
            yield given, "move init_scale between the bounds"

    @property
    def floor(self) -> float:
        """Return the lowest scale of the rule."""
        return self.min_scale if self.dynamic else self.init_scale

    @classmethod
    def torch(
        cls,
        init_scale: float = TORCH_INIT_SCALE,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = TORCH_GROWTH_INTERVAL,
    ) -> LossScaling:
        """Return the rule of ``torch.amp.GradScaler``: no floor, and fp32's own overflow as the ceiling."""
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
        """Return the rule of ``deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler``, from DeepSpeed's JSON keys.

        ``loss_scale > 0`` is a static scale, as in DeepSpeed. At the start and after an overflow, the first growth
        comes after ``loss_scale_window + 1`` clean steps. Each later one comes after ``loss_scale_window``.

        Raises:
            PlanError: every bad value at once.
        """
        if is_number(loss_scale) and loss_scale > 0:
            return cls.static(loss_scale)
        with Faults("LossScaling.deepspeed") as faults:
            if loss_scale != 0 or isinstance(loss_scale, bool):
                faults.add(f"loss_scale={loss_scale!r}", allowed="0 (dynamic) or a number > 0 (static)", fix="write 0")
            if not is_number(power := initial_scale_power) or not -126 <= power <= 127:
                faults.add(f"initial_scale_power={power!r}", allowed="a number from -126 to 127", fix="write 16")
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
        """Return the rule of Megatron-LM's ``DynamicGradScaler``, with the defaults of its command line."""
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
        """Return a rule whose scale never moves. Overflowing steps are still skipped."""
        return cls(init_scale=scale, min_scale=0.0, dynamic=False)


def _fp32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0] if is_number(value) and abs(value) <= FP32_MAX else value
