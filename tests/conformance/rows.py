"""The tables: rows of a policy and an optimizer, or of a family and a policy; columns; a sample of the cells."""

import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from conformance.families import FAMILIES, Family
from conformance.optimizers import STEPPERS, Stepper
from conformance.strategies import STRATEGIES
from support.cells import covering

MODES = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
PINS = {"*norm*": "fp32"}
CHECKPOINTED = "LlamaDecoderLayer"


@dataclass(frozen=True)
class Policy:
    mode: str
    pins: bool = False
    checkpointing: bool = False

    @property
    def name(self) -> str:
        """``16-mixed+pins+ckpt``."""
        return self.mode + "+pins" * self.pins + "+ckpt" * self.checkpointing

    @property
    def scaled(self) -> bool:
        return self.mode.startswith("16")

    @property
    def mixed(self) -> bool:
        return self.mode.endswith("-mixed")

    @property
    def compute(self) -> str:
        return {"32": "fp32", "bf16": "bf16", "16": "fp16"}[self.mode.split("-")[0]]

    @property
    def rounding(self) -> float:
        return {"fp32": 2**-23, "bf16": 2**-7, "fp16": 2**-10}[self.compute]

    @property
    def storage(self) -> str:
        return "fp32" if self.mixed else self.compute

    @property
    def norm_storage(self) -> str:
        return "fp32" if self.pins else self.storage

    def plan(self, loss_scaling: Any = None) -> Any:
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


@dataclass(frozen=True)
class Row:
    policy: Policy
    by: str = "adamw_fused"

    @property
    def stepper(self) -> Stepper:
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
        return FAMILIES[self.family]

    @property
    def tolerance(self) -> float:
        """How far losses, and how far of their way weights may be: some roundings of the mode's format.

        Weights that are stored in it are rounded to it at every step, and one step moves them by ``MOVE``. Sums of
        hundreds of terms are taken in fp32, in another order on two ranks.
        """
        return max(1e-4, (4 if self.policy.mixed else 1 / MOVE) * self.policy.rounding)

    def plan(self) -> Any:
        from lightning_mp import LossScaling, MixedPrecisionPlan

        policy = self.policy
        return MixedPrecisionPlan(
            policy.mode,
            pins={"norms": "fp32"} if policy.pins else None,
            checkpointing=self.of.blocks if policy.checkpointing else None,
            loss_scaling=LossScaling(init_scale=SCALE) if policy.scaled else None,
        )


@dataclass(frozen=True)
class CompiledRow:
    """A small model, what of it is compiled, by which backend, and its plan."""

    way: str
    backend: str
    mode: str
    pins: str = ""
    checkpointing: bool = False
    watched: bool = False

    @property
    def name(self) -> str:
        """``module.compile() aot_eager: 16-mixed+norms+ckpt+watched``."""
        marks = [self.pins, "ckpt" * self.checkpointing, "watched" * self.watched]
        return f"{self.way} {self.backend}: {'+'.join([self.mode, *filter(None, marks)])}"

    @property
    def tolerance(self) -> float:
        """How far losses and gradients may be from those in eager mode, of the largest number.

        ``aot_eager`` runs the same operators. Inductor adds up in another order, and does not round to half precision
        between what it fuses: some roundings of the format that is computed in.
        """
        if self.backend == "aot_eager":
            return 0.0
        in_fp32 = self.mode == "32-true" or (self.pins == "all" and self.mode.endswith("-mixed"))
        # FP8: a quarter of e4m3's, since some of the products in a sum are rounded to the other side
        half = {"fp8-mixed": 2**-5, "16-mixed": 2**-10, "16-true": 2**-10}.get(self.mode, 2**-7)
        return 8 * (2**-23 if in_fp32 else half)

    def plan(self) -> Any:
        """Of this row; its loss scale overflows in the first step, and in no other."""
        from lightning_mp import FP8, LossScaling, MixedPrecisionPlan

        return MixedPrecisionPlan(
            self.mode,
            pins={"": None, "norms": {"norms": "fp32"}, "all": {"*": "fp32"}}[self.pins],
            checkpointing="Block" if self.checkpointing else None,
            loss_scaling=LossScaling(init_scale=2.0**30, backoff_factor=2.0**-20) if self.mode[:2] == "16" else None,
            fp8=FP8(emulate=True, small="convert") if self.mode.startswith("fp8") else None,
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
#: what is compiled: the LightningModule, or each block, in torch's two ways
WAYS = ("torch.compile(module)", "module.compile()", "torch.compile(block)", "block.compile()")
COMPILED_ROWS = {
    row.name: row
    for backend in ("aot_eager", "inductor")
    for way in WAYS
    for mode in (*MODES, "fp8-mixed")
    for pins in ("", "norms", "all")
    for checkpointing in (False, True)
    for watched in (False, True)
    for row in [CompiledRow(way, backend, mode, pins, checkpointing, watched)]
    # nothing is left for FP8; and a graph of inductor's takes seconds, while the callbacks watch FP8 alone from inside
    if not (mode == "fp8-mixed" and pins == "all") and not (backend == "inductor" and watched and mode != "fp8-mixed")
}
ROWS: dict[str, Row | FamilyRow | CompiledRow] = {**PLAN, **OPTIMIZERS, **FAMILY_ROWS, **COMPILED_ROWS}
#: table → its rows, its columns
_HOSTS = tuple(strategy for strategy in STRATEGIES if "@" not in strategy and strategy != "pipeline")
TABLES = {
    "plan": (tuple(PLAN), STRATEGIES),
    "families": (tuple(FAMILY_ROWS), ("single", "ddp", "fsdp2", "deepspeed_zero2")),
    "optimizers": (tuple(OPTIMIZERS), _HOSTS),
    "compiled": (tuple(COMPILED_ROWS), ("single", "ddp", "fsdp2")),
}
Key = tuple[str, str]
Pair = tuple[tuple[str, object], ...]


def _pairs(cell: Key) -> set[Pair]:
    """Every two of what a cell is made of, in each table, whatever the family; of optimizers the row and the column."""
    strategy, name = cell
    row = ROWS[name]
    if isinstance(row, CompiledRow):
        return {(("compiled", True), *pair) for pair in combinations({"strategy": strategy, **asdict(row)}.items(), 2)}
    policy = {"mode": row.policy.mode, "pins": row.policy.pins, "checkpointing": row.policy.checkpointing}
    values: dict[str, object] = {"strategy": strategy, **policy}
    if isinstance(row, FamilyRow):
        return {(("families", True), *pair) for pair in combinations(values.items(), 2)}
    if not row.declared:
        return {(("optimizer", name),), (("optimizers", True), ("strategy", strategy))}
    return set(combinations(values.items(), 2))


def choose(cells: Iterable[Key], seed: str) -> list[Key]:
    """Of ``cells``, some in which every pair occurs that occurs in them; another seed chooses others."""
    cells = list(cells)
    order = list(dict.fromkeys(strategy for strategy, _ in cells))
    random.Random(seed).shuffle(cells)
    chosen = covering({cell: _pairs(cell) for cell in cells})
    return sorted(chosen, key=lambda cell: order.index(cell[0]))
