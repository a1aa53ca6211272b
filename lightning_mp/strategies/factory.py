"""The factory: ``make_strategy``, ``register_plan`` and ``trainer_kwargs``."""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from os import PathLike
from typing import Any, cast

from lightning_mp.compat.lightning import Strategy
from lightning_mp.errors import Faults, PlanError
from lightning_mp.plan.plan import MixedPrecisionPlan
from lightning_mp.strategies import registry
from lightning_mp.strategies.base import PlanStrategy


def make_strategy(name: str, plan: MixedPrecisionPlan, **overrides: Any) -> Strategy:
    """Return a strategy that runs ``plan``: ``Trainer(strategy=make_strategy("fsdp2", plan))``.

    The plan may be given to the Trainer too. The Trainer refuses another plan, another precision
    plugin, and ``precision=`` other than ``"32-true"``.

    Args:
        name: ``auto``, ``ddp``, ``fsdp2`` (or ``fsdp``), ``hsdp``, ``fsdp1``, ``pipeline``,
            ``deepspeed_zero1`` to ``3``, with or without ``mp_`` in front. ``fsdp2``, ``fsdp1`` and
            the DeepSpeed names may end in ``_offload``, ``deepspeed_zero1`` and ``2`` in ``_half``.
        plan: the plan of the run. Contradictions with ``overrides`` are found here.
        overrides: keywords of the strategy and of its host (Lightning's class, DDP, FSDP).

    Raises:
        PlanError: an unknown name or keyword, with near ones; a contradiction between plan and
            overrides; or ``plan`` is no MixedPrecisionPlan.
        MissingExtraError: DeepSpeed is needed and not installed.
    """
    _check_plan(plan, "make_strategy")
    return _built(name, plan, overrides)


def register_plan(name: str, plan: MixedPrecisionPlan | Mapping[str, Any] | str | PathLike[str]) -> None:
    """Register ``strategy="mp_<strategy>@<name>"`` with Lightning for every strategy.

    Packages that take strings can then name it. Every Trainer gets its own copy of the plan, which
    wins over ``precision=``. A second call with the same name replaces the plan. Capitals make no
    difference, as in all of Lightning's strategy names.

    Args:
        name: letters, digits, ``_`` and ``-``.
        plan: a plan, a mapping of its arguments, or the path of a YAML file.

    Raises:
        PlanError: a name with other characters, or a plan that cannot be built.
    """
    with Faults("register_plan") as faults:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):  # pyright: ignore[reportUnnecessaryIsInstance]
            faults.add(f"name={name!r}", allowed="letters, digits, '_' and '-'", fix="choose a name such as 'mine'")
    made = plan if isinstance(plan, MixedPrecisionPlan) else MixedPrecisionPlan.from_config(plan)
    registry.register(f"@{name.lower()}", partial(_named, plan=made, plan_name=name))


def _named(strategy: str, plan: MixedPrecisionPlan, plan_name: str) -> Strategy:
    built = _built(strategy, deepcopy(plan), {})
    cast(PlanStrategy, built).plan_name = plan_name
    return built


def trainer_kwargs(
    plan: MixedPrecisionPlan,
    *,
    strategy: str | Strategy = "auto",
    devices: int | str | Sequence[int] = "auto",
    callbacks: Any = None,
    **trainer_args: Any,
) -> dict[str, Any]:
    """Return the Trainer arguments of a plan.

    Write ``Trainer(**trainer_kwargs(plan, strategy="fsdp2", devices=8))``. ``strategy`` is a name
    for :func:`make_strategy`, or a strategy. ``plugins`` are kept next to the plan. Other arguments
    are returned as they are. The Trainer refuses a second precision plugin.

    Raises:
        PlanError: an unknown strategy, or ``plan`` is no MixedPrecisionPlan.
        MissingExtraError: DeepSpeed is needed and not installed.
    """
    _check_plan(plan, "trainer_kwargs")
    plugins = trainer_args.pop("plugins", None) or []
    plugins = list(cast("Sequence[Any]", plugins)) if isinstance(plugins, (list, tuple)) else [plugins]
    others = [plugin for plugin in plugins if not plan.same_as(plugin)]
    built = _built(strategy, plan, {}) if isinstance(strategy, str) else strategy
    own = {} if callbacks is None else {"callbacks": callbacks}
    return {"plugins": [plan, *others], "strategy": built, "devices": devices, **own, **trainer_args}


def _built(name: str, plan: MixedPrecisionPlan, overrides: dict[str, Any]) -> Strategy:
    strategy: Any = registry.build(name, plan.policy, overrides)
    strategy.made_for, strategy.made_again = plan, partial(_built, name, plan, overrides)
    return strategy


def _check_plan(plan: object, subject: str) -> None:
    if not isinstance(plan, MixedPrecisionPlan):
        fix = "write MixedPrecisionPlan('bf16-mixed'), or MixedPrecisionPlan.from_config(...)"
        raise PlanError.of(f"plan={plan!r}, not a MixedPrecisionPlan", fix, subject)
