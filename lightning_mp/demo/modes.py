"""The ladder: which plan each mode is, and on which devices it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_mp.demo.inputs import InputError
from lightning_mp.errors import nearest

if TYPE_CHECKING:
    from lightning_mp.demo.shapes import Device
    from lightning_mp.precision import MixedPrecisionPlan

# High enough that the first steps overflow fp16 (65504 at most) and the scale has to find its place, and quick to grow
# back: torch's own 2**16 and 2000 steps would not move in a demo's length.
FP16_INIT_SCALE = 2.0**20
FP16_GROWTH_INTERVAL = 20
TF32_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Mode:
    """A rung of the ladder. ``code`` is the plan as a user types it, ``plan`` builds it."""

    name: str
    code: str
    plan: Callable[[], MixedPrecisionPlan]


def _fp32() -> MixedPrecisionPlan:
    from lightning_mp.precision import MixedPrecisionPlan

    return MixedPrecisionPlan("32-true")


def _tf32() -> MixedPrecisionPlan:
    from lightning_mp.precision import MixedPrecisionPlan

    return MixedPrecisionPlan("32-true", tf32="high")


def _fp16() -> MixedPrecisionPlan:
    from lightning_mp.policy import LossScaling
    from lightning_mp.precision import MixedPrecisionPlan

    scaling = LossScaling(init_scale=FP16_INIT_SCALE, growth_interval=FP16_GROWTH_INTERVAL)
    return MixedPrecisionPlan("16-mixed", loss_scaling=scaling)


def _bf16() -> MixedPrecisionPlan:
    from lightning_mp.precision import MixedPrecisionPlan

    return MixedPrecisionPlan("bf16-mixed")


def _bf16_ckpt() -> MixedPrecisionPlan:
    from lightning_mp.precision import MixedPrecisionPlan

    return MixedPrecisionPlan("bf16-mixed", checkpointing="*.h.*")


LADDER: tuple[Mode, ...] = (
    Mode("fp32", 'MixedPrecisionPlan("32-true")', _fp32),
    Mode("tf32", 'MixedPrecisionPlan("32-true", tf32="high")', _tf32),
    Mode(
        "fp16",
        'MixedPrecisionPlan("16-mixed", loss_scaling='
        f"LossScaling(init_scale={FP16_INIT_SCALE}, growth_interval={FP16_GROWTH_INTERVAL}))",
        _fp16,
    ),
    Mode("bf16", 'MixedPrecisionPlan("bf16-mixed")', _bf16),
    Mode("bf16-ckpt", 'MixedPrecisionPlan("bf16-mixed", checkpointing="*.h.*")', _bf16_ckpt),
)
MODES: dict[str, Mode] = {mode.name: mode for mode in LADDER}


def parse_modes(text: str) -> list[Mode]:
    """The modes named in a comma-separated list, in its order, each once.

    Raises:
        InputError: a name that is no mode, or no name at all.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in dict.fromkeys(names) if name not in MODES]
    if unknown:
        near = ", ".join(filter(None, (nearest(name.lower(), MODES, count=1) for name in unknown)))
        raise InputError(
            f"--modes with {', '.join(map(repr, unknown))}",
            ", ".join(MODES),
            f"did you mean {near}?" if near else "write names from this list, with commas between them",
        )
    if not names:
        raise InputError(f"--modes {text!r}, which names no mode", ", ".join(MODES), "leave it out for all of them")
    return [MODES[name] for name in dict.fromkeys(names)]


def why_not(mode: Mode, device: Device) -> str | None:
    """Why ``mode`` does not run on ``device``, in a few words; ``None`` where it does."""
    if mode.name != "tf32":
        return None
    if device.capability is None:
        return "a CPU has no TF32"
    if device.capability < TF32_CAPABILITY:
        major, minor = device.capability
        return f"TF32 needs compute capability 8.0, this is {major}.{minor}"
    return None
