"""Checks of how the model is trained: loss scale, optimizer, schedule, DeepSpeed's JSON."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from traceback import extract_tb
from typing import Any, cast

import torch

from lightning_mp import planner
from lightning_mp.compat.lightning import DeepSpeedStrategy, LightningModule, parsed_optimizers
from lightning_mp.deepspeed_config.merge import add_trainer, compose
from lightning_mp.errors import Fault, PlanError, one_line
from lightning_mp.monitor.doctor.case import HALF, ModelUnderTest
from lightning_mp.monitor.findings import Finding
from lightning_mp.monitor.side_run import untouched
from lightning_mp.policy.pieces import FP32_MAX, TORCH_INIT_SCALE

FP16_MAX = 65504.0
#: Under it a gradient of 1/256 still fits into fp16: a mean over 256 numbers has such a one at the loss.
HIGH_SCALE = 2.0**24
#: Above it not even fp16's smallest number, 2**-24, fits once scaled: whatever is not 0 overflows.
HOPELESS_SCALE = FP16_MAX * 2.0**24
_STEPS = "gradient_accumulation_steps"


# ---------------------------------------------------------------------- a step


def step_raises(case: ModelUnderTest) -> Iterator[Finding]:
    """A step of the LightningModule that raises: one is made for real, of a copy, on the CPU."""
    meta = any(parameter.is_meta for parameter in case.parameters.values())
    if case.batch is None or meta or not isinstance(case.model, LightningModule):
        return
    error = planner.step_error(case.model, case.batch, case.policy, case.precision)
    if error is None:
        return
    # the last line of the user's own code that the error went through; else the one that raised it
    frames = extract_tb(error.__traceback__)
    ours = ("site-packages", "dist-packages", str(Path(planner.__file__).parents[1]), sysconfig.get_path("stdlib"))
    frame = next((f for f in reversed(frames) if not any(part in f.filename for part in ours)), frames[-1])
    where = f"{Path(frame.filename).name}:{frame.lineno}"
    what, why = f"a step raises {type(error).__name__}: {one_line(error)}", f"{where}, in {frame.name}: `{frame.line}`"
    on_cpu = case.device.type == "cpu"  # what the step was made on
    why, severity = (why, "error") if on_cpu else (f"{why}, on the CPU", "warning")
    yield Finding("step_raises", severity, what, why, "mend it; a run prints the whole traceback", where)


# ---------------------------------------------------------------------- the loss scale


def scale_overflows_at_once(case: ModelUnderTest) -> Iterator[Finding]:
    """An initial scale that nearly every gradient overflows at: each halving costs a step."""
    rule = case.scaling
    if rule is None or rule.init_scale <= HIGH_SCALE:
        return
    # the first backoff takes ``hysteresis`` overflows
    backoffs = math.ceil(math.log(TORCH_INIT_SCALE / rule.init_scale, rule.backoff_factor) - 1e-9)
    steps = f"about {backoffs - 1 + rule.hysteresis} steps are skipped until the scale is down to 65536"
    if rule.floor > HIGH_SCALE:
        steps = f"and the scale never falls below {rule.floor:g}: such steps are skipped forever"
    why = f"a gradient of {FP16_MAX / rule.init_scale:.1g} overflows fp16 once scaled; {steps}"
    severity, what = (
        "error" if rule.floor > HOPELESS_SCALE else "warning",
        f"the loss scale starts at {rule.init_scale:g}",
    )
    fix = f"use {_starting(case, TORCH_INIT_SCALE)}"
    yield Finding("scale_overflows_at_once", severity, what, why, fix, "loss_scaling.init_scale")


def _starting(case: ModelUnderTest, scale: float) -> str:
    """How the loss scale starts at ``scale``, with a floor that lets it."""
    if case.policy is None:
        return f"the plugin MixedPrecision('16-mixed', device, torch.amp.GradScaler(device, init_scale={scale!r}))"
    return f"a dynamic scale, LossScaling(init_scale={scale!r}, min_scale={min(1.0, scale)!r})"


def accumulation_overflows(case: ModelUnderTest) -> Iterator[Finding]:
    """Scaled gradients whose sum over micro-batches, the scaled mean, leaves the format it is stored in."""
    rule, parts = case.scaling, int(case.argument("accumulate_grad_batches", 1))
    half = any(case.stored(parameter) == "fp16" for parameter in case.trained.values())
    dtype, limit = ("fp16", FP16_MAX) if half else ("fp32", FP32_MAX)
    if rule is None or parts <= 1 or rule.init_scale < limit:
        return
    what = f"{parts} micro-batches are summed in {dtype} at a loss scale of {rule.init_scale:g}"
    why = (
        f"{dtype} ends at {limit:g}: the sum overflows where a gradient is {limit / rule.init_scale:.3g} or more, "
        "although that of each micro-batch fits"
    )
    # the power of 2 that leaves a factor of 16 below the limit
    scale = 2.0 ** (math.floor(math.log2(limit / parts)) - 4)
    fix = f"use {_starting(case, scale)}{', or 16-mixed, whose gradients are fp32' * half}"
    yield Finding("accumulation_overflows", "warning", what, why, fix, "accumulate_grad_batches")


# ---------------------------------------------------------------------- optimizers and schedules


def optimizer_eps_underflows(case: ModelUnderTest) -> Iterator[Finding]:
    """An ``eps`` that is 0 with fp16 state; fused kernels compute in fp32."""
    if not any(case.stored(parameter) == "fp16" for parameter in case.trained.values()):
        return
    for optimizer in _configured(case)[0]:
        groups = [group for group in optimizer.param_groups if not group.get("fused")]
        given = [g.get("eps") for g in groups if any(case.stored(parameter) == "fp16" for parameter in g["params"])]
        eps = [one for one in given if isinstance(one, float) and one > 0 and torch.tensor(one).half().item() == 0]
        if eps:
            name = type(optimizer).__name__
            what = f"{name}(eps={min(eps)!r}) with weights and state in fp16, where that is 0"
            why = "wherever a gradient is 0, or its square is, the first step divides by 0: weights become NaN"
            fix = f"set {name}(eps=1e-4) or fused=True, or store weights in fp32 with '16-mixed'"
            yield Finding("eps_underflows", "error", what, why, fix, "configure_optimizers")


def schedule_counts_skips(case: ModelUnderTest) -> Iterator[Finding]:
    """A schedule that goes on at steps that a stock loss scaler skips; a plan holds it."""
    if case.scaling is None or case.policy is not None:
        return
    names = [type(schedule.scheduler).__name__ for schedule in _configured(case)[1] if schedule.interval == "step"]
    if names:
        what = f"{', '.join(names)} advances at every step, including those that the loss scaler skips"
        why = "the first steps in fp16 are often skipped: warm-up is cut short, and the schedule runs ahead"
        fix = f"use MixedPrecisionPlan('{case.precision}'), which holds schedules on a skipped step"
        yield Finding("schedule_counts_skips", "warning", what, why, fix, "configure_optimizers")


def _configured(case: ModelUnderTest) -> tuple[list[Any], list[Any]]:
    """The optimizers, and each schedule with its interval, given or from ``configure_optimizers``.

    Raises:
        Exception: whatever ``configure_optimizers`` raises, which often needs a Trainer.
    """
    given = case.optimizer
    if given is None and isinstance(case.model, LightningModule):
        trained = [(parameter, parameter.requires_grad) for parameter in case.model.parameters()]
        with untouched(case.model, torch.device("cpu")):
            try:
                given = case.model.configure_optimizers()
            finally:
                for parameter, requires_grad in trained:
                    parameter.requires_grad_(requires_grad)
    return ([], []) if given is None else parsed_optimizers(given)


# ---------------------------------------------------------------------- DeepSpeed's JSON


def deepspeed_contradicts_trainer(case: ModelUnderTest) -> Iterator[Finding]:
    """Every key of the JSON that contradicts plan or Trainer, with both values."""
    own: Any = case.strategy
    stock = DeepSpeedStrategy in type(own).__mro__
    config, stage, offloads = own, None, dict[str, bool]()
    if stock and hasattr(own, "plan_engine"):
        config, stage, stock = own._given or {}, own._stage, False
        offloads = {key: on for key, on in own._zero.items() if key != "stage"}
    elif stock:
        config = own.config
    if not isinstance(config, Mapping):
        return
    why = "the run is refused before its first step, or DeepSpeed silently uses that of the JSON"
    for fault in dict.fromkeys(_contradictions(case, cast("Mapping[str, Any]", config), stage, offloads, stock)):
        where = fault.given.partition("=")[0]
        yield Finding("deepspeed_contradicts_trainer", "error", fault.given, why, fault.fix, where)


def _contradictions(
    case: ModelUnderTest, json: Mapping[str, Any], stage: int | None, offloads: Mapping[str, bool], stock: bool
) -> Iterator[Fault]:
    """What the JSON says otherwise than plan and Trainer do."""
    try:
        if case.policy is not None:
            stage = stage or int((json.get("zero_optimization") or {}).get("stage") or 1)
            compose(case.policy, json, stage=stage, **offloads)
    except PlanError as error:
        yield from error.faults
    for block in HALF if case.policy is None else ():
        if (json.get(block) or {}).get("enabled") is True and not case.precision.startswith(block.removeprefix("fp")):
            given = f"{block}.enabled=True in the JSON and precision={case.precision!r} in the Trainer"
            yield Fault(given, "", f"set {block}.enabled to false, or train in it")
    if not case.trainer:
        return
    devices, nodes = case.argument("devices", "auto"), case.argument("num_nodes", 1)
    world = devices * nodes if isinstance(devices, int) and devices > 0 else None
    # without a known number of devices nothing can be said of the whole batch
    config = {key: value for key, value in json.items() if world is not None or key != "train_batch_size"}
    by_norm = case.argument("gradient_clip_algorithm", "norm") == "norm"
    accumulate = int(case.argument("accumulate_grad_batches", 1))
    clip = case.argument("gradient_clip_val") if by_norm else None
    try:
        add_trainer(config, clip_norm=clip, accumulate=accumulate, world_size=world or 1)
    except PlanError as error:
        yield from error.faults
        return
    if stock and _STEPS in config:  # Lightning's own strategy lets the JSON win where it does not refuse it
        given = f"{_STEPS}={config[_STEPS]!r} in the JSON and Trainer(accumulate_grad_batches={accumulate})"
        yield Fault(given, "", f"remove {_STEPS} from the JSON: Lightning's DeepSpeedStrategy takes the Trainer's")
