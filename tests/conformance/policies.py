"""The rows of the matrix: modes, each with and without pins, with and without activation checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MODES = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
PINS = {"*norm*": "fp32"}
CHECKPOINTED = "LlamaDecoderLayer"


@dataclass(frozen=True)
class Policy:
    """One row."""

    mode: str
    pins: bool = False
    checkpointing: bool = False

    @property
    def name(self) -> str:
        """``16-mixed+pins+ckpt``."""
        return self.mode + "+pins" * self.pins + "+ckpt" * self.checkpointing

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled."""
        return self.mode.startswith("16")

    @property
    def mixed(self) -> bool:
        """Whether computation is in another dtype than storage."""
        return self.mode.endswith("-mixed")

    @property
    def half(self) -> str:
        """What the mode's number stands for."""
        return {"32": "fp32", "bf16": "bf16", "16": "fp16"}[self.mode.split("-")[0]]

    @property
    def compute(self) -> str:
        """What unpinned matrix products run in."""
        return self.half

    @property
    def rounding(self) -> float:
        """How far apart the mode's numbers are just above 1."""
        return {"fp32": 2**-23, "bf16": 2**-7, "fp16": 2**-10}[self.half]

    @property
    def storage(self) -> str:
        """What unpinned parameters are stored in."""
        return "fp32" if self.mixed else self.half

    @property
    def norm_storage(self) -> str:
        """What the norms, which are what is pinned, are stored in."""
        return "fp32" if self.pins else self.storage

    def plan(self, loss_scaling: Any = None) -> Any:
        """The plan of this row; ``loss_scaling`` is left out where the mode has none."""
        from lightning_mp import MixedPrecisionPlan

        return MixedPrecisionPlan(
            self.mode,
            pins=PINS if self.pins else None,
            checkpointing=CHECKPOINTED if self.checkpointing else None,
            loss_scaling=loss_scaling if self.scaled else None,
        )


POLICIES = {
    policy.name: policy
    for mode in MODES
    for pins in (False, True)
    for checkpointing in (False, True)
    for policy in [Policy(mode, pins, checkpointing)]
}
