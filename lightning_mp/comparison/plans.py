"""The plans that are compared: words, files, policies and plans, each under the name it is told by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard, cast

from lightning_mp.errors import Faults, PlanError
from lightning_mp.policy import PRECISIONS, PrecisionPolicy, precision_word
from lightning_mp.policy.presets import PRESETS, preset
from lightning_mp.policy.words import precision_fix
from lightning_mp.precision import MixedPrecisionPlan

#: a precision's word or a preset's name, a file of a plan, or a plan
PlanLike = str | PathLike[str] | Mapping[str, Any] | PrecisionPolicy | MixedPrecisionPlan
Plans = Sequence[PlanLike] | Mapping[str, PlanLike]


def read(plans: Plans | str, faults: Faults) -> dict[str, PrecisionPolicy]:
    """The policies by name, in their order; what cannot be one is noted in ``faults``.

    A string is several, with commas between. A word is called as it was written, a file by its stem; a name that comes
    again gets a number.
    """
    if isinstance(plans, str):
        plans = [part.strip() for part in plans.split(",") if part.strip()]
    given = plans.items() if isinstance(plans, Mapping) else [(_name(plan), plan) for plan in plans]
    found: dict[str, PrecisionPolicy] = {}
    for name, plan in given:
        policy = _policy(plan, faults)
        if policy is not None:
            number = sum(other == name or other.startswith(f"{name} (") for other in found)
            found[f"{name} ({number + 1})" if number else name] = policy
    if len(plans) < 2:
        faults.add(f"{len(plans)} plan{'s' * (len(plans) != 1)}", "two or more", "write bf16-mixed,fp8-mixed")
    return found


def _name(plan: PlanLike) -> str:
    if isinstance(plan, (PrecisionPolicy, MixedPrecisionPlan)):
        return plan.precision if isinstance(plan, PrecisionPolicy) else plan.policy.precision
    if isinstance(plan, Mapping):
        return str(plan.get("precision", "plan"))
    return Path(plan).stem if _is_file(plan) else str(plan)


def _is_file(plan: object) -> TypeGuard[str | PathLike[str]]:
    return isinstance(plan, PathLike) or (isinstance(plan, str) and (plan.endswith((".yaml", ".yml")) or "/" in plan))


def _policy(plan: PlanLike, faults: Faults) -> PrecisionPolicy | None:
    if isinstance(plan, (PrecisionPolicy, MixedPrecisionPlan)):
        return plan if isinstance(plan, PrecisionPolicy) else plan.policy
    try:
        if isinstance(plan, Mapping) or _is_file(plan):
            return MixedPrecisionPlan.from_config(plan).policy
        return preset(str(plan)) if plan in PRESETS else _of_word(plan, faults)
    except PlanError as error:
        faults.extend(error.faults)
    return None


def _of_word(plan: object, faults: Faults) -> PrecisionPolicy | None:
    word = precision_word(plan)
    if word is not None:
        return PrecisionPolicy(precision=cast("Any", word))
    faults.add(f"plan {plan!r}", ", ".join([*PRECISIONS, *PRESETS, "a YAML file"]), precision_fix(plan, (), PRESETS))
    return None
