"""The plan as data: which numbers live in which format. No torch here, so that a config can be checked anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar, cast, get_args

from lightning_mp.errors import Fault, Faults, PlanError, nearest
from lightning_mp.policy.loss_scaling import LossScaling

Precision = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "auto"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
SCALED_PRECISIONS = ("16-mixed", "16-true", "auto")

_ALIASES = {
    "fp32": ("float32", "float", "32"),
    "tf32": ("tensorfloat32",),
    "bf16": ("bfloat16",),
    "fp16": ("float16", "half", "16"),
    "fp8": ("float8",),
}
DTYPES = {alias: name for name, aliases in _ALIASES.items() for alias in (name, *aliases)}
STORAGE_DTYPES = ("fp32", "bf16", "fp16")


def dtype_name(value: object) -> str:
    """The short name (``"bf16"``) of a dtype given as ``"bf16"``, ``"bfloat16"``, ``torch.bfloat16``, ….

    Raises:
        PlanError: the value names no dtype this package knows.
    """
    name = DTYPES.get(str(value).lower().removeprefix("torch."))
    if name is None:
        near = nearest(str(value), DTYPES)
        fix = f"did you mean {near}?" if near else "write one of these"
        raise PlanError([Fault(f"dtype {value!r}", ", ".join(_ALIASES), fix)], "dtype")
    return name


def _storage_dtype(value: object, what: str, faults: Faults, others: tuple[str, ...] = ()) -> str:
    name = DTYPES.get(str(value).lower().removeprefix("torch."))
    if name in STORAGE_DTYPES:
        return name
    if name is not None:
        fix = f"{name} is no storage format: write fp32"
    else:
        near = nearest(str(value), STORAGE_DTYPES + others)
        fix = f"did you mean {near}?" if near else "write one of these"
    faults.add(f"{what}={value!r}", ", ".join(STORAGE_DTYPES + others), fix)
    return str(value)


def _set(instance: object, **values: object) -> None:
    """Normalise fields of a frozen dataclass while it is being built."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)


@dataclass(frozen=True, slots=True)
class Pin:
    """One module-level dtype: every module that ``pattern`` covers is stored and run in ``dtype``.

    Args:
        pattern: an fnmatch against a module's name, any dotted suffix of it, or its class.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        output: the dtype of what the module hands on: ``None`` for the mode's rule (its own dtype under the mixed
            modes, the dtype that came in under the true modes), ``"pin"``, ``"input"``, or a dtype.
    """

    pattern: str
    dtype: str
    output: str | None = None

    def __post_init__(self) -> None:
        faults = Faults("Pin")
        pattern: object = self.pattern
        if not isinstance(pattern, str) or not pattern:
            faults.add(f"pattern={pattern!r}", "a non-empty fnmatch pattern", "'*norm*' covers every norm by name")
        _set(self, dtype=_storage_dtype(self.dtype, f"pin {self.pattern!r}: dtype", faults))
        if self.output not in (None, "pin", "input"):
            _set(self, output=_storage_dtype(self.output, f"pin {self.pattern!r}: output", faults, ("pin", "input")))
        faults.raise_if_any()


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointing:
    """Which modules recompute their activations in the backward pass instead of storing them.

    Args:
        modules: a pattern as in :class:`Pin`, a module class, or several; of nested matches the outermost counts.
        mode: ``"full"`` recomputes everything; ``"selective"`` keeps the outputs of ``save_ops``.
        every: of the matches, only every so-manyth is checkpointed.
        save_ops: names of aten operators, ``"mm"`` or ``"aten.mm.default"``; ``None``: matrix products and attention.
        preserve_rng: whether the recomputation draws the random numbers that the first pass drew.
    """

    modules: str | tuple[str, ...]
    mode: Literal["full", "selective"] = "full"
    every: int = 1
    save_ops: tuple[str, ...] | None = None
    preserve_rng: bool = True

    def __post_init__(self) -> None:
        faults = Faults("Checkpointing")
        given = cast("object", self.modules)
        items = (
            [given] if isinstance(given, (str, type)) or not isinstance(given, Iterable) else list(cast("Any", given))
        )
        names = tuple(item.__name__ if isinstance(item, type) else item for item in items)
        if not names or not all(isinstance(name, str) and name for name in names):
            faults.add(f"modules={given!r}", "a pattern, a module class, or several", "modules='*.h.*'")
        if self.mode not in ("full", "selective"):
            faults.add(f"mode={self.mode!r}", "'full', 'selective'", "'full' recomputes everything")
        every: object = self.every
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            faults.add(f"every={every!r}", "an integer >= 1", "2 checkpoints every second module")
        save_ops = _names(self.save_ops, faults)
        if save_ops is not None and self.mode == "full":
            faults.add("save_ops with mode='full'", "save_ops with mode='selective'", "set mode='selective'")
        if not isinstance(self.preserve_rng, bool):
            faults.add(f"preserve_rng={self.preserve_rng!r}", "True, False", "write a boolean, without quotes")
        faults.raise_if_any()
        _set(self, modules=names[0] if len(names) == 1 else names, save_ops=save_ops)

    @property
    def patterns(self) -> tuple[str, ...]:
        """``modules`` as a tuple."""
        return (self.modules,) if isinstance(self.modules, str) else self.modules


def _names(value: object, faults: Faults) -> tuple[str, ...] | None:
    if value is None or isinstance(value, str):
        return None if value is None else (value,)
    if isinstance(value, Iterable):
        return tuple(str(name) for name in cast("Iterable[object]", value))
    faults.add(f"save_ops={value!r}", "names of aten operators", "save_ops=('mm', 'addmm')")
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFinite:
    """What happens to a step whose gradients are not finite.

    With loss scaling an overflow is ordinary: only skips at the scale's floor count, and ``"ignore"`` still skips.

    Args:
        action: ``"skip"`` leaves it out, and raises after too many in a row; ``"raise"`` stops at the first;
            ``"ignore"`` applies it, as stock Lightning does.
        max_consecutive: how many in a row ``"skip"`` leaves out before it raises.
    """

    action: Literal["skip", "raise", "ignore"] = "skip"
    max_consecutive: int = 100

    def __post_init__(self) -> None:
        faults = Faults("NonFinite")
        if self.action not in ("skip", "raise", "ignore"):
            faults.add(f"nonfinite={self.action!r}", "'skip', 'raise', 'ignore'", "'skip' is the default")
        budget: object = self.max_consecutive
        if not isinstance(budget, int) or isinstance(budget, bool) or budget < 0:
            faults.add(f"max_consecutive={budget!r}", "an integer >= 0", "100 is the default")
        faults.raise_if_any()


_Piece = TypeVar("_Piece", LossScaling, Checkpointing, NonFinite)

LossScalingLike = LossScaling | Mapping[str, Any] | None
PinsLike = Mapping[str, Any] | Iterable[Pin | Mapping[str, Any]] | None
CheckpointingLike = Checkpointing | Mapping[str, Any] | str | None
NonFiniteLike = NonFinite | Mapping[str, Any] | str
TF32_SETTINGS = ("highest", "high", "medium")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionPolicy:
    """Everything a plan declares, checked and normalised.

    ``tf32`` is a setting of ``torch.set_float32_matmul_precision`` or ``None`` to leave it alone; ``reduce_dtype`` is
    the format gradients are summed in across ranks; ``buffer_dtype`` that of floating buffers (``None``: as the
    parameters under the true modes, untouched under the others).

    Raises:
        PlanError: every fault of every field at once.
    """

    precision: str = "bf16-mixed"
    loss_scaling: LossScaling | None = None
    pins: tuple[Pin, ...] = ()
    tf32: str | None = None
    checkpointing: Checkpointing | None = None
    nonfinite: NonFinite = NonFinite()
    reduce_dtype: str = "fp32"
    buffer_dtype: str | None = None

    def __post_init__(self) -> None:
        faults = Faults()
        _set(
            self,
            precision=_precision(self.precision, faults),
            loss_scaling=_loss_scaling(self.loss_scaling, self.precision, faults),
            pins=_pins(self.pins, faults),
            tf32=_tf32(self.tf32, faults),
            checkpointing=_checkpointing(self.checkpointing, faults),
            nonfinite=_nonfinite(self.nonfinite, faults),
            reduce_dtype=_storage_dtype(self.reduce_dtype or "fp32", "reduce_dtype", faults),
        )
        if self.buffer_dtype is not None:
            _set(self, buffer_dtype=_storage_dtype(self.buffer_dtype, "buffer_dtype", faults))
        faults.raise_if_any()

    @property
    def storage_dtype(self) -> str:
        """What unpinned parameters are stored in."""
        return {"bf16-true": "bf16", "16-true": "fp16"}.get(self.precision, "fp32")

    @property
    def compute_dtype(self) -> str:
        """What unpinned matrix products run in."""
        return {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(self.precision, self.storage_dtype)

    @property
    def mixed(self) -> bool:
        """Whether autocast is on."""
        return self.precision.endswith("-mixed")

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain values (str, int, float, bool, None, list, dict); ``from_dict`` is its inverse."""
        values = asdict(self)
        values["pins"] = [asdict(pin) for pin in self.pins]
        if self.checkpointing is not None:
            values["checkpointing"] |= {
                "modules": list(self.checkpointing.patterns),
                "save_ops": None if self.checkpointing.save_ops is None else list(self.checkpointing.save_ops),
            }
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrecisionPolicy:
        """A policy from a mapping of its fields; unknown keys are refused with the nearest known ones."""
        faults = Faults()
        known = _known_fields(cls, values, "", faults)
        try:
            policy = cls(**known)
        except PlanError as error:
            faults.extend(error.faults)
        else:
            faults.raise_if_any()
            return policy
        raise PlanError(faults.found)


def _known_fields(kind: type[Any], values: Mapping[str, Any], prefix: str, faults: Faults) -> dict[str, Any]:
    names = [item.name for item in fields(kind)]
    for key in values:
        if key not in names:
            near = nearest(str(key), names)
            faults.add(
                f"unknown key {prefix}{key}",
                ", ".join(names),
                f"did you mean {near}?" if near else "remove it",
            )
    return {key: value for key, value in values.items() if key in names}


def _piece(kind: type[_Piece], value: object, what: str, faults: Faults) -> _Piece | None:
    """A piece of the policy from an instance or a mapping of its fields; its faults join the others."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        faults.add(f"{what}={value!r}", f"{kind.__name__}(...) or a mapping of its fields", f"write {kind.__name__}()")
        return None
    known = _known_fields(kind, cast("Mapping[str, Any]", value), f"{what}.", faults)
    try:
        return kind(**known)
    except PlanError as error:
        faults.extend(error.faults)
    except TypeError as error:  # a required field is missing
        faults.add(f"{what}={dict(known)!r}", f"the fields of {kind.__name__}", str(error))
    return None


def _precision(value: object, faults: Faults) -> str:
    if value not in PRECISIONS:
        near = nearest(str(value), PRECISIONS)
        fix = f"did you mean {near}?" if near else "write one of these"
        faults.add(f"precision={value!r}", ", ".join(PRECISIONS), fix)
    return str(value)


def _loss_scaling(value: object, precision: object, faults: Faults) -> LossScaling | None:
    scaled = precision in SCALED_PRECISIONS
    if value is None:
        return LossScaling() if scaled and precision != "auto" else None
    if not scaled and precision in PRECISIONS:
        faults.add(
            f"loss_scaling with precision={precision!r}, which has no loss scale",
            "loss_scaling with " + ", ".join(SCALED_PRECISIONS),
            "remove loss_scaling, or choose '16-mixed'",
        )
    return _piece(LossScaling, value, "loss_scaling", faults)


def _pins(value: object, faults: Faults) -> tuple[Pin, ...]:
    if isinstance(value, Mapping):
        entries = [_pin_entry(pattern, spec) for pattern, spec in cast("Mapping[Any, Any]", value).items()]
    elif value is None:
        entries = []
    elif isinstance(value, Iterable) and not isinstance(value, str):
        entries = list(cast("Iterable[Any]", value))
    else:
        faults.add(f"pins={value!r}", "a mapping of pattern to dtype, or a list of Pin", "pins={'*norm*': 'fp32'}")
        return ()
    pins: list[Pin] = []
    for entry in entries:
        if isinstance(entry, Pin):
            pins.append(entry)
            continue
        if not isinstance(entry, Mapping):
            faults.add(f"pin {entry!r}", "Pin(pattern, dtype) or a mapping of its fields", "Pin('*norm*', 'fp32')")
            continue
        known = _known_fields(Pin, cast("Mapping[str, Any]", entry), "pins.", faults)
        try:
            pins.append(Pin(**known))
        except PlanError as error:
            faults.extend(error.faults)
        except TypeError as error:
            faults.add(f"pin {known!r}", "a pattern and a dtype", str(error))
    return tuple(pins)


def _pin_entry(pattern: object, spec: object) -> object:
    """An entry of a ``{pattern: dtype | Pin | fields}`` mapping as a Pin or the fields of one."""
    if isinstance(spec, Pin):
        return {"pattern": pattern, "dtype": spec.dtype, "output": spec.output}
    if isinstance(spec, Mapping):
        return {"pattern": pattern, **cast("Mapping[str, Any]", spec)}
    return {"pattern": pattern, "dtype": spec}


def _tf32(value: object, faults: Faults) -> str | None:
    if value is None or value in TF32_SETTINGS:
        return cast("str | None", value)
    if isinstance(value, bool):
        return "high" if value else "highest"
    faults.add(f"tf32={value!r}", "None, True, False, " + ", ".join(map(repr, TF32_SETTINGS)), "'high' turns TF32 on")
    return None


def _checkpointing(value: object, faults: Faults) -> Checkpointing | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = {"modules": value}
    return _piece(Checkpointing, value, "checkpointing", faults)


def _nonfinite(value: object, faults: Faults) -> NonFinite:
    if isinstance(value, str):
        value = {"action": value}
    return _piece(NonFinite, value, "nonfinite", faults) or NonFinite()
