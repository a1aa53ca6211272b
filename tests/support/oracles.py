"""Stock Lightning under the same mode: what the plan is compared with."""

from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_mp import LossScaling, MixedPrecisionPlan

MODES = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
SCALED = ("16-mixed", "16-true")
UNSCALED = ("32-true", "bf16-mixed", "bf16-true")
#: low enough that nothing overflows in the small models here, high enough that a missing division would show
CALM_SCALE = 256.0


def plan_for(mode: str, loss_scaling: LossScaling | None = None, **options: Any) -> MixedPrecisionPlan:
    """A plan whose scale, where the mode has one, starts low enough for the small models here."""
    if mode in SCALED:
        options["loss_scaling"] = loss_scaling or LossScaling(init_scale=CALM_SCALE)
    return MixedPrecisionPlan(mode, **options)


def stock_for(mode: str, device: str = "cpu", **scaling: Any) -> dict[str, Any]:
    if mode != "16-mixed":
        return {"precision": mode}
    scaler = torch.amp.GradScaler(device, **{"init_scale": CALM_SCALE, **scaling})
    return {"plugins": [MixedPrecision("16-mixed", device, scaler)]}
