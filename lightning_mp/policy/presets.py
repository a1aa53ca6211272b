"""Named policies: the modes by their everyday names, the one that suits each common GPU, and known recipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_mp.errors import Faults
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.policy.pieces import LossScaling

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


def preset(name: str) -> PrecisionPolicy:
    """The policy called ``name``.

    Raises:
        PlanError: no preset has that name.
    """
    with Faults() as faults:
        if name not in PRESETS:
            faults.unknown("preset", name, PRESETS, "choose one of these")
    return PrecisionPolicy(**PRESETS[name])
