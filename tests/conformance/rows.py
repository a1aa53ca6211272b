"""The rows of each table: a policy and an optimizer, or a family of models and a policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conformance.families import FAMILIES, Family
from conformance.optimizers import STEPPERS, Stepper
from conformance.policies import POLICIES, Policy
from conformance.strategies import STRATEGIES


@dataclass(frozen=True)
class Row:
    """A Llama under a policy, stepped by an optimizer of this name."""

    policy: Policy
    by: str = "adamw_fused"

    @property
    def stepper(self) -> Stepper:
        """What steps it."""
        return STEPPERS[self.by]

    @property
    def declared(self) -> bool:
        """Whether each module's dtype is known from the policy alone; else a plain loop's are expected."""
        return self.by == "adamw_fused"


#: what a loss is scaled by, and how much of its weights' length a step of a family moves in fp32
SCALE, MOVE = 256.0, 0.05


@dataclass(frozen=True)
class FamilyRow:
    """A family under a mode, its normalizations pinned to fp32 or its blocks recomputed or neither."""

    family: str
    policy: Policy

    @property
    def of(self) -> Family:
        """What is trained."""
        return FAMILIES[self.family]

    @property
    def tolerance(self) -> float:
        """How far losses, and how far of their way weights may be: some roundings of the mode's format.

        Weights that are stored in it are rounded to it at every step, and one step moves them by ``MOVE``. Sums of
        hundreds of terms are taken in fp32, in another order on two ranks.
        """
        return max(1e-4, (4 if self.policy.mixed else 1 / MOVE) * self.policy.rounding)

    def plan(self) -> Any:
        """Of this row."""
        from lightning_mp import LossScaling, MixedPrecisionPlan

        policy = self.policy
        return MixedPrecisionPlan(
            policy.mode,
            pins={"norms": "fp32"} if policy.pins else None,
            checkpointing=self.of.blocks if policy.checkpointing else None,
            loss_scaling=LossScaling(init_scale=SCALE) if policy.scaled else None,
        )


PLAN = {name: Row(policy) for name, policy in POLICIES.items()}
#: SAM takes a gradient twice, which loss scaling refuses
OPTIMIZERS = {f"{by} 16-mixed": Row(POLICIES["16-mixed"], by=by) for by in STEPPERS}
OPTIMIZERS["sam bf16-mixed"] = Row(POLICIES["bf16-mixed"], by="sam")
FAMILY_ROWS = {
    f"{name}: {policy.name}": FamilyRow(name, policy)
    for name in FAMILIES
    for policy in POLICIES.values()
    if not (policy.pins and policy.checkpointing)
}
ROWS: dict[str, Row | FamilyRow] = {**PLAN, **OPTIMIZERS, **FAMILY_ROWS}

#: table → its rows, its columns
_HOSTS = tuple(strategy for strategy in STRATEGIES if "@" not in strategy and strategy != "pipeline")
TABLES = {
    "plan": (tuple(PLAN), STRATEGIES),
    "families": (tuple(FAMILY_ROWS), ("single", "ddp", "fsdp2", "deepspeed_zero2")),
    "optimizers": (tuple(OPTIMIZERS), _HOSTS),
}
