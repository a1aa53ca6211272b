"""The words people write for a precision, and what each means: the same in Python, YAML and on the command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from lightning_mp.errors import did_you_mean, nearest

Precision = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "fp8-mixed", "auto"]
PRECISIONS: tuple[str, ...] = get_args(Precision)

#: what a precision stores unpinned parameters in, and what most matrix products run in (those of ``"fp8-mixed"`` that
#: are not converted); Lightning's own plugins leave parameters that are to be stored in fp32 as they are
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

_ALIASES = {
    "fp32": ("float32", "float", "32"),
    "tf32": ("tensorfloat32",),
    "bf16": ("bfloat16",),
    "fp16": ("float16", "half", "16"),
    "fp8": ("float8",),
}
DTYPES = {alias: name for name, aliases in _ALIASES.items() for alias in (name, *aliases)}
#: how a precision begins that is of such a format, where otherwise than the format
_BEGINNINGS = {"fp32": "32", "fp16": "16"}
#: a format alone, as Lightning reads it
_ALONE = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "fp8": "fp8-mixed"}


def precision_word(value: object) -> str | None:
    """The precision that ``value`` means, such as ``"16-mixed"`` for ``16``, ``"FP16_mixed"`` or ``torch.float16``.

    ``None`` where it means none. A format alone means what it means to Lightning's Trainer: ``16`` and ``"bf16"`` the
    mixed modes, ``32`` the true one (``lightning.fabric.connector._convert_precision_to_unified_args``).
    """
    text = str(value).strip().lower().replace("_", "-").removeprefix("torch.")
    name, _, kind = text.partition("-")
    form = DTYPES.get(name, name)
    form = _BEGINNINGS.get(form, form)
    word = f"{form}-{kind}" if kind else _ALONE.get(form, form)
    return word if word in PRECISIONS else None


def precision_fix(value: object, presets: Iterable[str] = (), others: Iterable[str] = ()) -> str:
    """What to write instead of ``value``, which is no precision; bf16 is offered to nobody who wrote fp16.

    ``presets`` are told by their call, ``others`` are names that may be written as well.
    """
    text = str(value).strip().lower().replace("_", "-").removeprefix("torch.")
    if text in {name.replace("_", "-") for name in presets}:
        return f"MixedPrecisionPlan.preset({text.replace('-', '_')!r}) is the plan of that name"
    if "64" in text or "double" in text:
        return "double precision is not offered: write '32-true', or use Trainer(precision='64-true') without a plan"
    half = "bf16" if "bf" in text or text.startswith("b") else "16" if "16" in text or nearest(text, ["half"]) else ""
    near = [word for word in dict.fromkeys([*PRECISIONS, *others]) if word.startswith((half, f"fp{half}"))]
    return did_you_mean(text, near, f"did you mean {', '.join(map(repr, near))}?" if half else "write one of these")
