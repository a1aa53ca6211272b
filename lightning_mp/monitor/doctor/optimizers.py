"""Problems of optimizers and schedules, found by calling ``configure_optimizers`` without a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from inspect import unwrap
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_mp.compat.lightning import DeepSpeedStrategy, LightningModule
from lightning_mp.engines.optimizer_facts import keeps_small_updates
from lightning_mp.monitor.doctor.case import HALF, Case
from lightning_mp.monitor.findings import Finding
from lightning_mp.monitor.health.norms import some
from lightning_mp.monitor.side_run import untouched
from lightning_mp.numerics.dtypes import to_torch

#: what a plan says of the last step
_HELD = "step_skipped"
#: the share of weights that has to stay as it is for a learning rate to be called too small
VANISH = 0.5


def eps_underflows(case: Case) -> Iterator[Finding]:
    """An ``eps`` that is 0 beside fp16 state; fused kernels compute in fp32."""
    if not any(case.stored(parameter) == "fp16" for _, _, parameter in case.trained):
        return
    for optimizer in configured(case)[0]:
        eps = [group["eps"] for group in optimizer.param_groups if _vanishes(case, group)]
        if eps:
            name = type(optimizer).__name__
            yield Finding(
                name="eps_underflows",
                severity="error",
                what=f"{name}(eps={min(eps)!r}) beside weights and state in fp16, where that is 0",
                why="wherever a gradient is 0, or its square is, the first step divides by 0: weights become NaN",
                fix=f"set {name}(eps=1e-4) or fused=True, or store weights in fp32 with '16-mixed'",
                where="configure_optimizers",
            )


def _vanishes(case: Case, group: Mapping[str, Any]) -> bool:
    eps = group.get("eps")
    if group.get("fused") or not isinstance(eps, float) or eps <= 0:
        return False
    zero = torch.tensor(eps, dtype=torch.float16).item() == 0
    return zero and any(case.stored(parameter) == "fp16" for parameter in group["params"])


def schedule_counts_skips(case: Case) -> Iterator[Finding]:
    """A schedule that goes on at steps that a loss scaler skips; under automatic optimization a plan holds it."""
    by_hand = isinstance(case.model, LightningModule) and not case.model.automatic_optimization
    if case.scaling is None or (case.policy is not None and not by_hand):
        return
    called = _called(case.model) if by_hand else set[str]()
    if _HELD in called:
        return
    stepped = "lr_schedulers" in called
    names = [type(scheduler).__name__ for scheduler, interval in configured(case)[1] if stepped or interval == "step"]
    if names:
        plan = [] if case.policy is not None else [f"use MixedPrecisionPlan('{case.precision}')"]
        held = f"advance it only where not self.trainer.precision_plugin.{_HELD}"
        yield Finding(
            name="schedule_counts_skips",
            severity="warning",
            what=f"{', '.join(names)} advances at every step, including those that the loss scaler skips",
            why="the first steps in fp16 are often skipped: warm-up is cut short, and the schedule runs ahead",
            fix=" and ".join([*plan, held]) if by_hand else f"{plan[0]}, which holds schedules on a skipped step",
            where="training_step" if by_hand else "configure_optimizers",
        )


def updates_vanish(case: Case) -> Iterator[Finding]:
    """A learning rate that is too small for weights stored in half precision alone, without fp32 masters."""
    if case.policy is None and (isinstance(case.strategy, DeepSpeedStrategy) or "deepspeed" in str(case.strategy)):
        return  # its own engines keep fp32 masters
    for optimizer in configured(case)[0]:
        if keeps_small_updates(optimizer):
            continue
        lost, every, rates = _vanishing(case, optimizer)
        if every and lost > VANISH * every:
            name, half = type(optimizer).__name__, next(word for word in HALF if word in rates)
            mixed = "16-mixed" if half == "fp16" else "bf16-mixed"
            yield Finding(
                name="updates_vanish",
                severity="warning",
                what=f"{name}(lr={rates[half]:g}) cannot move {lost / every:.0%} of the weights, "
                f"stored in {half} alone",
                why="an update of the learning rate's size is below half of the last bit of these weights, and is "
                "rounded away; Adam's updates are of that size at most",
                fix=f"use '{mixed}', which keeps fp32 weights, or an optimizer that rounds stochastically, such as "
                "torchao.optim's with bf16_stochastic_round=True",
                where="configure_optimizers",
            )


def _vanishing(case: Case, optimizer: Optimizer) -> tuple[int, int, dict[str, float]]:
    """How many weights stay what they are under an update of the learning rate, of how many in half precision."""
    lost = every = 0
    rates: dict[str, float] = {}
    trained = {id(parameter) for _, _, parameter in case.trained}
    for group in optimizer.param_groups:
        lr = group.get("initial_lr", group["lr"])  # a schedule that warms up has lowered it
        halves = [p for p in group["params"] if id(p) in trained and case.stored(p) in HALF] if lr else []
        for parameter in halves:
            stored = case.stored(parameter)
            rates.setdefault(stored, float(lr))
            weight = some(parameter.detach()).to(to_torch(stored))
            up, down = ((weight.float() + step).to(weight.dtype) == weight for step in (float(lr), -float(lr)))
            share = (up & down).float().mean().item() if weight.numel() else 0.0
            lost, every = lost + round(share * parameter.numel()), every + parameter.numel()
    return lost, every, rates


def _called(model: nn.Module) -> set[str]:
    """The names that the model's own code for a step refers to."""
    hooks = [unwrap(getattr(type(model), name)) for name in ("training_step", "on_train_batch_end")]
    return {name for hook in hooks for name in hook.__code__.co_names}


def configured(case: Case) -> tuple[list[Optimizer], list[tuple[Any, str]]]:
    """The optimizers, and each schedule with its interval, given or from ``configure_optimizers``.

    Raises:
        Exception: whatever ``configure_optimizers`` raises, which often needs a Trainer.
    """
    given = case.optimizer
    if given is None:
        if not isinstance(case.model, LightningModule):
            return [], []
        given = _configure(case.model)
    return _read(given)


def _configure(module: LightningModule) -> Any:
    """What ``configure_optimizers`` returns; what it changes in the module is undone."""
    trained = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    with untouched(module, torch.device("cpu")):
        try:
            return module.configure_optimizers()
        finally:
            for parameter, requires_grad in trained:
                parameter.requires_grad_(requires_grad)


def _read(given: Any) -> tuple[list[Optimizer], list[tuple[Any, str]]]:
    """All that Lightning accepts from ``configure_optimizers``."""
    if isinstance(given, Mapping):
        found = cast("Mapping[str, Any]", given)
        schedulers = [found["lr_scheduler"]] if "lr_scheduler" in found else []
        return [found["optimizer"]], [_interval(scheduler) for scheduler in schedulers]
    if isinstance(given, (list, tuple)):
        items = list(cast("Iterable[Any]", given))
        if len(items) == 2 and isinstance(items[0], (list, tuple)):
            return list(items[0]), [_interval(scheduler) for scheduler in items[1]]
        both = [_read(item) for item in items]
        return [one for some, _ in both for one in some], [one for _, some in both for one in some]
    return ([given], []) if isinstance(given, Optimizer) else ([], [])


def _interval(scheduler: Any) -> tuple[Any, str]:
    if isinstance(scheduler, Mapping):
        return scheduler["scheduler"], str(cast("Any", scheduler).get("interval", "epoch"))
    return scheduler, "epoch"
