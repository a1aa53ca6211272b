"""TF32 for a project on stock plugins."""

from __future__ import annotations

from collections.abc import Callable

from lightning_mp.callbacks.acting import ActingCallback
from lightning_mp.compat.lightning import LightningModule, Trainer, rank_zero_info
from lightning_mp.errors import Faults
from lightning_mp.numerics.tf32 import has_tf32, set_tf32
from lightning_mp.policy import PrecisionPolicy


class EnableTF32(ActingCallback):
    """Lets fp32 matrix products and convolutions run in TF32 during the run, and gives the setting back afterwards.

    Args:
        setting: ``"high"``, ``"medium"``, or ``"highest"`` for IEEE fp32. On a device without TF32 it changes nothing
            and says so.

    Raises:
        PlanError: an unknown setting, or a MixedPrecisionPlan beside it (use its ``tf32=``).
    """

    plan_field = "tf32"

    def __init__(self, setting: str = "high") -> None:
        super().__init__()
        self.setting = PrecisionPolicy(precision="32-true", tf32=setting).tf32 or "high"

    def apply(self, trainer: Trainer, pl_module: LightningModule, faults: Faults) -> Callable[[], object] | None:
        """Set TF32 where the device has it."""
        device = trainer.strategy.root_device
        if not has_tf32(device):
            rank_zero_info(f"EnableTF32({self.setting!r}) changes nothing on {device.type}: it has no TF32")
            return None
        return set_tf32(self.setting)
