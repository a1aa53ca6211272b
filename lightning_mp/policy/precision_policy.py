"""The plan as data. It imports no torch, so a config can be checked anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar, cast, get_args

from lightning_mp.errors import Faults, PlanError, did_you_mean, nearest
from lightning_mp.policy.pieces import (
    DTYPES,
    FP8,
    Checkpointing,
    LossScaling,
    NonFinite,
    Pin,
    call,
    normalise,
    storage_dtype,
)

Precision = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "fp8-mixed", "auto"]
PRECISIONS: tuple[str, ...] = get_args(Precision)

#: by precision: the dtypes of unpinned parameters, and of unpinned matrix products that are not converted to FP8.
#: Lightning's own mixed plugins do not cast parameters to fp32; they leave them as they are.
DTYPES_OF: Mapping[str, tuple[str, str]] = {
    "64-true": ("fp64", "fp64"),
    "32-true": ("fp32", "fp32"),
    "bf16-mixed": ("fp32", "bf16"),
    "16-mixed": ("fp32", "fp16"),
    "bf16-true": ("bf16", "bf16"),
    "16-true": ("fp16", "fp16"),
    "fp8-mixed": ("fp32", "bf16"),
    "transformer-engine": ("bf16", "fp8"),
    "transformer-engine-float16": ("fp16", "fp8"),
}
#: the words of Lightning's own plugins
STOCK_PRECISIONS = tuple(word for word in DTYPES_OF if word != "fp8-mixed")

#: the first part of a precision, for formats with another name
_BEGINNINGS = {"fp32": "32", "fp16": "16"}
#: the precision that Lightning understands by a format alone
_ALONE = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "fp8": "fp8-mixed"}


def precision_word(value: object) -> str | None:
    """Return the precision of a spelling: ``"16-mixed"`` for ``16``, ``"FP16_mixed"`` or ``torch.float16``.

    ``None`` if it is no spelling of one. A format alone is read as by Lightning's Trainer: ``16`` and ``"bf16"`` are
    the mixed modes, ``32`` is the true mode (``lightning.fabric.connector._convert_precision_to_unified_args``).
    """
    name, _, kind = _plain(value).partition("-")
    form = DTYPES.get(name, name)
    form = _BEGINNINGS.get(form, form)
    word = f"{form}-{kind}" if kind else _ALONE.get(form, form)
    return word if word in PRECISIONS else None


def _plain(value: object) -> str:
    return str(value).strip().lower().replace("_", "-").removeprefix("torch.")


def precision_fix(value: object, presets: Iterable[str] = (), others: Iterable[str] = ()) -> str:
    """Return the advice for a value that is no precision: a preset's call, or near words.

    bf16 is not offered to a user who wrote fp16.
    """
    text = _plain(value)
    if text in map(_plain, presets):
        return f"MixedPrecisionPlan.preset({text.replace('-', '_')!r}) is the plan of that name"
    if "64" in text or "double" in text:
        return "double precision is not offered: write '32-true', or use Trainer(precision='64-true') without a plan"
    half = "bf16" if "bf" in text or text.startswith("b") else "16" if "16" in text or nearest(text, ["half"]) else ""
    near = [word for word in dict.fromkeys([*PRECISIONS, *others]) if word.startswith((half, f"fp{half}"))]
    return did_you_mean(text, near, f"did you mean {', '.join(map(repr, near))}?" if half else "write one of these")


SCALED_PRECISIONS = ("16-mixed", "16-true", "auto")

_Kind = TypeVar("_Kind")
_Piece = TypeVar("_Piece", LossScaling, Checkpointing, NonFinite, Pin, FP8)

# the types of the plan's arguments; jsonargparse reads these too
LossScalingLike = LossScaling | Mapping[str, Any] | None
PinsLike = Mapping[str, Any] | Iterable[Pin | Mapping[str, Any]] | None
CheckpointingLike = Checkpointing | Mapping[str, Any] | str | None
FP8Like = FP8 | Mapping[str, Any] | str | None
NonFiniteLike = NonFinite | Mapping[str, Any] | str
TF32_SETTINGS = ("highest", "high", "medium")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionPolicy:
    """The fields of a plan, checked and normalised.

    ``tf32`` is a setting of ``torch.set_float32_matmul_precision``; ``None`` leaves it alone. ``reduce_dtype`` is the
    format in which gradients are summed over ranks. ``buffer_dtype`` is the format of floating buffers; ``None`` casts
    them as the parameters under the true modes and leaves them alone under the others.

    ``precision`` may have any spelling that :func:`precision_word` reads. The field holds one of ``PRECISIONS``.

    Raises:
        PlanError: every fault of every field at once.
    """

    precision: str = "bf16-mixed"
    loss_scaling: LossScaling | None = None
    pins: tuple[Pin, ...] = ()
    tf32: str | None = None
    checkpointing: Checkpointing | None = None
    fp8: FP8 | None = None
    nonfinite: NonFinite = field(default_factory=NonFinite)
    reduce_dtype: str = "fp32"
    buffer_dtype: str | None = None

    def __post_init__(self) -> None:
        buffers: object = self.buffer_dtype
        with Faults() as faults:
            normalise(self, precision=_precision(self.precision, faults))
            normalise(
                self,
                loss_scaling=self._scoped(LossScaling, "loss_scaling", SCALED_PRECISIONS, faults),
                pins=_pins(self.pins, faults),
                tf32=_tf32(self.tf32, faults),
                checkpointing=_piece(Checkpointing, self.checkpointing, "checkpointing", faults, "modules"),
                fp8=self._scoped(FP8, "fp8", ("fp8-mixed",), faults, "recipe"),
                nonfinite=_piece(NonFinite, self.nonfinite, "nonfinite", faults, "action") or NonFinite(),
                reduce_dtype=storage_dtype(self.reduce_dtype or "fp32", "reduce_dtype", faults),
                buffer_dtype=None if buffers is None else storage_dtype(buffers, "buffer_dtype", faults),
            )

    def _scoped(
        self, kind: type[_Piece], name: str, precisions: tuple[str, ...], faults: Faults, word: str = ""
    ) -> _Piece | None:
        """Return a piece that only ``precisions`` have: the given one, or its default.

        ``None`` under other precisions, and under ``"auto"`` if none is given. A given piece that the precision
        cannot have is a fault.
        """
        value = getattr(self, name)
        if value is None:
            return cast("Any", kind)() if self.precision in precisions and self.precision != "auto" else None
        if self.precision in PRECISIONS and self.precision not in precisions:
            given, fix = f"{name} with precision={self.precision!r}", f"remove {name}, or choose {precisions[0]!r}"
            faults.add(given, allowed=f"{name} with {', '.join(precisions)}", fix=fix)
        return _piece(kind, value, name, faults, word)

    def __repr__(self) -> str:
        return call(type(self).__name__, self.arguments())

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that build the policy again: the precision, and each field that is not its default."""
        default = PrecisionPolicy(precision=self.precision)
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        given = {name: value for name, value in values.items() if value != getattr(default, name)}
        if self.pins:
            plain = {pin.pattern: pin.dtype for pin in self.pins if pin == Pin(pin.pattern, pin.dtype)}
            given["pins"] = plain if len(plain) == len(self.pins) else list(self.pins)
        return {"precision": self.precision, **given}

    @property
    def storage_dtype(self) -> str:
        """Return the dtype of unpinned parameters."""
        return DTYPES_OF.get(self.precision, DTYPES_OF["32-true"])[0]

    @property
    def compute_dtype(self) -> str:
        """Return the dtype of unpinned matrix products that are not converted to FP8."""
        return DTYPES_OF.get(self.precision, DTYPES_OF["32-true"])[1]

    @property
    def mixed(self) -> bool:
        """True if the steps run under autocast."""
        return self.precision.endswith("-mixed")

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain values (str, int, float, bool, None, list, dict); ``from_dict`` is its inverse."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrecisionPolicy:
        """A policy from a mapping of its fields; unknown keys are refused with the nearest known ones."""
        with Faults() as faults:
            policy = _built(cls, _known(cls, values, "", faults), faults)
        return cast("PrecisionPolicy", policy)

    @classmethod
    def from_saved(cls, values: Mapping[str, Any]) -> tuple[PrecisionPolicy, list[str]]:
        """Return the policy of a file that ``to_dict`` is in, and the keys that are no field of it.

        Another release may have written them.
        """
        unknown: list[str] = []
        return cls(**_without_unknown(cls, values, "", unknown)), unknown


#: the fields of a policy whose saved values are mappings, or lists of mappings
_PIECES: Mapping[str, type[Any]] = {
    "loss_scaling": LossScaling,
    "pins": Pin,
    "checkpointing": Checkpointing,
    "fp8": FP8,
    "nonfinite": NonFinite,
}


def _without_unknown(kind: type[Any], values: Any, prefix: str, unknown: list[str]) -> Any:
    """Return saved ``values`` with the fields of ``kind`` alone; the other keys are added to ``unknown``."""
    if isinstance(values, list):
        return [_without_unknown(kind, item, prefix, unknown) for item in cast("list[Any]", values)]
    if not isinstance(values, Mapping):
        return values
    names, known = [item.name for item in fields(kind)], dict[str, Any]()
    for key, value in cast("Mapping[str, Any]", values).items():
        if key not in names:
            unknown.append(f"{prefix}{key}")
        elif kind is PrecisionPolicy and key in _PIECES:
            known[key] = _without_unknown(_PIECES[key], value, f"{key}.", unknown)
        else:
            known[key] = value
    return known


def _known(kind: type[Any], values: Mapping[str, Any], prefix: str, faults: Faults) -> dict[str, Any]:
    """Return the entries whose key is a field of ``kind``; add a fault with a near field for every other key."""
    names = [item.name for item in fields(kind)]
    for key in [key for key in values if key not in names]:
        fix = did_you_mean(str(key), names, "remove it")
        faults.add(f"unknown key {prefix}{key}", allowed=", ".join(names), fix=fix)
    return {key: value for key, value in values.items() if key in names}


def _built(kind: type[_Kind], known: dict[str, Any], faults: Faults) -> _Kind | None:
    """An instance of a dataclass; its faults join the others."""
    try:
        return kind(**known)
    except PlanError as error:
        faults.extend(error.faults)
        return None


def _piece(kind: type[_Piece], value: object, what: str, faults: Faults, word: str = "") -> _Piece | None:
    """A piece of the policy from an instance or a mapping; ``word`` is the field that a string alone says."""
    if isinstance(value, kind) or (value is None and kind is not Pin):
        return value
    if word and isinstance(value, str):
        value = {word: value}
    name, shown = kind.__name__, f"{what}={[value] if kind is Pin else value!r}"
    if not isinstance(value, Mapping):
        faults.add(shown, allowed=f"{name}(...) or a mapping of its fields", fix=f"write {name}(...)")
        return None
    known = _known(kind, cast("Mapping[str, Any]", value), f"{what}.", faults)
    missing = [item.name for item in fields(kind) if item.default is MISSING and item.name not in known]
    if missing:
        faults.add(shown, allowed=f"the fields of {name}", fix=f"add {' and '.join(map(repr, missing))}")
        return None
    return _built(kind, known, faults)


def _precision(value: object, faults: Faults) -> str:
    word = precision_word(value)
    if word is None:
        faults.add(f"precision={value!r}", allowed=", ".join(PRECISIONS), fix=precision_fix(value, preset_names()))
    return word or str(value)


def _pins(value: object, faults: Faults) -> tuple[Pin, ...]:
    entries: list[Any] = []
    if isinstance(value, Mapping):
        for pattern, spec in cast("Mapping[Any, Any]", value).items():
            fields_of = spec if isinstance(spec, Mapping) else {"dtype": spec}
            entry = {"pattern": pattern, **cast("Mapping[str, Any]", fields_of)}
            entries.append(replace(spec, pattern=pattern) if isinstance(spec, Pin) else entry)
    elif isinstance(value, Iterable) and not isinstance(value, str):
        entries = list(cast("Iterable[Any]", value))
    elif value is not None:
        allowed = "a mapping of pattern to dtype, or Pins"
        faults.add(f"pins={value!r}", allowed=allowed, fix="write pins={'*norm*': 'fp32'}")
    pins = [_piece(Pin, entry, "pins", faults) for entry in entries]
    return tuple(pin for pin in pins if pin is not None)


def _tf32(value: object, faults: Faults) -> str | None:
    if isinstance(value, bool):
        return "high" if value else "highest"
    if value is not None and value not in TF32_SETTINGS:
        allowed = ", ".join(map(repr, (None, True, False, *TF32_SETTINGS)))
        faults.add(f"tf32={value!r}", allowed=allowed, fix="write 'high' to turn TF32 on")
        return None
    return cast("str | None", value)


#: the modes by their everyday names, the one that suits each common GPU, and known recipes
PRESETS: Mapping[str, dict[str, Any]] = {
    "fp32": {"precision": "32-true"},
    "tf32": {"precision": "32-true", "tf32": "high"},
    "bf16": {"precision": "bf16-mixed"},
    "fp16": {"precision": "16-mixed"},
    "bf16_true": {"precision": "bf16-true"},
    "fp16_true": {"precision": "16-true"},
    "v100": {"precision": "16-mixed"},
    "t4": {"precision": "16-mixed"},
    "a100": {"precision": "bf16-mixed", "tf32": "high"},
    "h100": {"precision": "bf16-mixed", "tf32": "high"},
    "b200": {"precision": "bf16-mixed", "tf32": "high"},
    # LongSpec's: TF32, fp16 with the loss scale of DeepSpeed's own defaults, and norms in fp32
    "longspec": {
        "precision": "16-mixed",
        "loss_scaling": LossScaling.deepspeed(),
        "pins": {"*norm*": "fp32"},
        "tf32": "high",
    },
}


#: the group of entry points by which other packages add presets
PRESETS_GROUP = "lightning_mp.presets"


def preset_names() -> list[str]:
    """Return the names of this package's presets, then those of installed packages."""
    return list(dict.fromkeys([*PRESETS, *(entry.name for entry in entry_points(group=PRESETS_GROUP))]))


def preset(name: str) -> PrecisionPolicy:
    """Return the policy of a preset.

    Another package adds one by an entry point of the group ``lightning_mp.presets``, a mapping of a plan's arguments.
    This package's own presets win over others of the same name.

    Raises:
        PlanError: no preset has that name, or another package's preset is no valid mapping.
    """
    if name in PRESETS:
        return PrecisionPolicy(**PRESETS[name])
    others = {entry.name: entry for entry in entry_points(group=PRESETS_GROUP)}
    with Faults() as faults:
        if name not in others:
            faults.unknown("preset", name, preset_names(), "choose one of these")
    arguments = others[name].load()
    if not isinstance(arguments, Mapping):
        problem = f"preset {name!r} is {arguments!r}, from the entry point {others[name].value}"
        raise PlanError.of(problem, "let the entry point name a mapping of a plan's arguments")
    return PrecisionPolicy.from_dict(cast("Mapping[str, Any]", arguments))
