"""The rows of each table: a policy, what is trained under it, and what steps it."""

from __future__ import annotations

from dataclasses import dataclass

from conformance.models import SUBJECTS, Subject
from conformance.optimizers import STEPPERS, Stepper
from conformance.policies import POLICIES, Policy
from conformance.strategies import STRATEGIES


@dataclass(frozen=True)
class Row:
    """One row of a table: a name of each."""

    policy: Policy
    of: str = "llama"
    by: str = "adamw_fused"

    @property
    def subject(self) -> Subject:
        """What is trained."""
        return SUBJECTS[self.of]

    @property
    def stepper(self) -> Stepper:
        """What steps it."""
        return STEPPERS[self.by]

    @property
    def declared(self) -> bool:
        """Whether each module's dtype is known from the policy alone; else a plain loop's are expected."""
        return (self.of, self.by) == ("llama", "adamw_fused")


_MIXED = [POLICIES["bf16-mixed"], POLICIES["16-mixed"]]
PLAN = {name: Row(policy) for name, policy in POLICIES.items()}
MODELS = {f"{of} {policy.name}": Row(policy, of) for of in SUBJECTS if of != "llama" for policy in _MIXED}
#: SAM takes a gradient twice, which loss scaling refuses
OPTIMIZERS = {f"{by} 16-mixed": Row(POLICIES["16-mixed"], by=by) for by in STEPPERS}
OPTIMIZERS["sam bf16-mixed"] = Row(POLICIES["bf16-mixed"], by="sam")
ROWS = PLAN | MODELS | OPTIMIZERS

#: table → its rows, its columns
_HOSTS = tuple(strategy for strategy in STRATEGIES if "@" not in strategy and strategy != "pipeline")
TABLES = {
    "plan": (tuple(PLAN), STRATEGIES),
    "models": (tuple(MODELS), _HOSTS),
    "optimizers": (tuple(OPTIMIZERS), _HOSTS),
}
