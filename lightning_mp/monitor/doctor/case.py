"""What the checks examine: a model, and what plan, strategy and Trainer will make of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_mp.compat.lightning import check_copy
from lightning_mp.engines import for_strategy
from lightning_mp.errors import Fault, Faults, PlanError
from lightning_mp.modules import pins
from lightning_mp.numerics.dtypes import describe, dtype_name, to_torch
from lightning_mp.policy import PrecisionPolicy, hardware
from lightning_mp.policy.pieces import LossScaling
from lightning_mp.policy.precision_policy import DTYPES_OF, STOCK_PRECISIONS, precision_fix, precision_word

HALF = ("bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class ModelUnderTest:
    """One model under one way to train it.

    ``policy`` is ``None`` under Lightning's own plugins; ``storage`` is what unpinned parameters are cast to, ``None``
    where they stay as they are.
    """

    model: nn.Module
    precision: str
    storage: str | None
    compute: str
    policy: PrecisionPolicy | None = None
    scaling: LossScaling | None = None
    device: hardware.Device
    strategy: Any = None
    trainer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    optimizer: Any = None
    batch: Any = None

    @cached_property
    def modules(self) -> tuple[tuple[str, nn.Module], ...]:
        """Every module once, by its first name; the model itself is ``""``."""
        return tuple(self.model.named_modules())

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Every floating parameter once, by its first name."""
        return {name: one for name, one in self.model.named_parameters() if one.is_floating_point()}

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Those of ``parameters`` that are trained."""
        return {name: one for name, one in self.parameters.items() if one.requires_grad}

    @cached_property
    def pinned(self) -> dict[int, str]:
        """``id`` of every pinned module, and of every pinned parameter → the pin's dtype."""
        found = pins.resolve(self.model, () if self.policy is None else self.policy.pins, Faults())
        return {id(member.module): member.pin.dtype for member in found.members} | found.dtypes()

    @cached_property
    def _kept(self) -> dict[int, torch.dtype]:
        """Quantized weights, their scales and float64 parameters, which a plan does not cast."""
        return {} if self.policy is None else pins.kept_dtypes(self.model, to_torch(self.policy.storage_dtype))

    def stored(self, parameter: Tensor) -> str:
        """What ``parameter`` will be stored in while it is trained: ``"fp32"``, ``"bf16"``, …."""
        storage = None if id(parameter) in self._kept else self.storage
        return self.pinned.get(id(parameter)) or storage or dtype_name(parameter.dtype)


def case_of(
    model: nn.Module,
    plan: Any,
    strategy: Any,
    trainer: Mapping[str, Any],
    target: hardware.Device | None = None,
    **given: Any,
) -> ModelUnderTest:
    """The case for what a user hands to the doctor.

    Raises:
        PlanError: a model that is no module; a plan that cannot be carried out; an unknown precision.
    """
    if not isinstance(model, nn.Module):
        raise PlanError.of(f"model={model!r} is not a torch.nn.Module", "pass the module itself", "doctor")
    check_copy(model, "doctor")
    target = target or device_of(trainer)
    strategy = trainer.get("strategy") if strategy is None else strategy
    given |= {"model": model, "device": target, "strategy": strategy, "trainer": trainer}
    plan = _plan_in(trainer) if plan is None else plan
    policy = PrecisionPolicy.from_dict(cast("Mapping[str, Any]", plan)) if isinstance(plan, Mapping) else plan
    policy = getattr(policy, "policy", policy)
    if not isinstance(policy, PrecisionPolicy):
        return ModelUnderTest(**given, **_stock(plan))
    if policy.precision == "auto":
        policy = for_strategy.resolved(policy, target, model)
    return ModelUnderTest(
        precision=policy.precision,
        storage=policy.storage_dtype,
        compute=policy.compute_dtype,
        policy=policy,
        scaling=policy.loss_scaling,
        **given,
    )


def _plan_in(trainer: Mapping[str, Any]) -> Any:
    """The plan, plugin or precision among Trainer arguments; Lightning's default is 32-true."""
    plugins = trainer.get("plugins") or ()
    for plugin in cast("Iterable[Any]", plugins if isinstance(plugins, (list, tuple)) else (plugins,)):
        if hasattr(plugin, "policy") or isinstance(getattr(plugin, "precision", None), str):
            return plugin
    return trainer.get("precision") or "32-true"


def _stock(plan: Any) -> dict[str, Any]:
    """What Lightning's own plugin, given as such or by its precision, makes of the model."""
    given = str(getattr(plan, "precision", plan))
    precision = precision_word(given) or given
    if precision not in STOCK_PRECISIONS:
        fix = precision_fix(given, (), STOCK_PRECISIONS)
        allowed = f"a MixedPrecisionPlan, a mapping of its fields, {', '.join(STOCK_PRECISIONS)}"
        raise PlanError([Fault(f"plan={plan!r}", allowed, fix)], "doctor")
    storage, compute = DTYPES_OF[precision]
    scaling = None
    if precision == "16-mixed":
        scaler = getattr(plan, "scaler", None)
        scaling = LossScaling.torch() if scaler is None else LossScaling.torch(init_scale=scaler.get_scale())
    # Lightning casts to half and double precision alone
    cast_to = None if storage == "fp32" else storage
    return {"precision": precision, "storage": cast_to, "compute": compute, "scaling": scaling}


def device_of(trainer: Mapping[str, Any]) -> hardware.Device:
    """The device that Trainer arguments choose on this machine, as Lightning does; its facts."""
    accelerator = str(trainer.get("accelerator") or "auto").lower()
    for kind, backend in (("cuda", torch.cuda), ("mps", torch.backends.mps)):
        if accelerator in ("auto", "gpu", kind) and backend.is_available():
            return describe(torch.device(kind))
    if accelerator in ("gpu", "cuda"):
        return hardware.Device("cuda", "a GPU that is not in this machine")
    return describe(torch.device("cpu"))


def listed(names: Iterable[str], most: int = 4) -> str:
    """Some of ``names``, and how many more there are."""
    every = [name or "the model itself" for name in names]
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def below(name: str, above: str) -> bool:
    """Whether the module called ``name`` is ``above`` or lies in it."""
    return not above or name == above or name.startswith(f"{above}.")
