"""Checks of how the model is trained: loss scale, optimizer, schedule, DeepSpeed's JSON."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from traceback import FrameSummary, extract_tb
from typing import Any, cast

import torch
from torch.optim import Optimizer

from lightning_mp import planner
from lightning_mp.compat.lightning import DeepSpeedStrategy, LightningModule
from lightning_mp.deepspeed_config.merge import add_trainer, compose
from lightning_mp.errors import Fault, Faults, PlanError, one_line
from lightning_mp.monitor.doctor.case import HALF, ModelUnderTest
from lightning_mp.monitor.doctor.table import fact
from lightning_mp.monitor.events import Severity
from lightning_mp.monitor.findings import Finding
from lightning_mp.monitor.side_run import untouched
from lightning_mp.policy.pieces import FP32_MAX, TORCH_INIT_SCALE, LossScaling

FP16_MAX = 65504.0
#: the smallest positive number of fp16
FP16_TINY = 2.0**-24
#: Under it a gradient of 1/256 still fits into fp16: a mean over 256 numbers has such a one at the loss.
HIGH_SCALE = 2.0**24
#: Above it not even fp16's smallest number fits once scaled: whatever is not 0 overflows.
HOPELESS_SCALE = FP16_MAX / FP16_TINY
_STEPS = "gradient_accumulation_steps"


# ---------------------------------------------------------------------- a step


def step_raises(case: ModelUnderTest) -> Iterator[Finding]:
    """A step of the LightningModule that raises: one is made for real, of a copy, on the CPU."""
    batch = case.rows if case.batch is None else case.batch
    meta = any(parameter.is_meta for _, _, parameter in case.parameters)
    if batch is None or meta or not isinstance(case.model, LightningModule):
        return
    error = planner.step_error(case.model, batch, case.policy, case.precision)
    if error is None:
        return
    frame = _users_frame(error)
    where = f"{Path(frame.filename).name}:{frame.lineno}"
    what = f"a step raises {type(error).__name__}: {one_line(error)}"
    severity: Severity | None = None if case.device.type == "cpu" else "warning"  # what it was made on
    line = f"`{frame.line}`" + (", on the CPU" if severity else "")
    yield fact("step_raises", what, where, severity, place=f"{where}, in {frame.name}", line=line)


def _users_frame(error: BaseException) -> FrameSummary:
    """The last line of the user's own code that the error went through; else the one that raised it."""
    frames = extract_tb(error.__traceback__)
    ours = ("site-packages", "dist-packages", str(Path(planner.__file__).parents[1]), sysconfig.get_path("stdlib"))
    return next((f for f in reversed(frames) if not any(part in f.filename for part in ours)), frames[-1])


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
    what = f"the loss scale starts at {rule.init_scale:g}"
    words = {"gradient": FP16_MAX / rule.init_scale, "steps": steps, "scaling": _starting(case, rule, TORCH_INIT_SCALE)}
    severity: Severity | None = "error" if rule.floor > HOPELESS_SCALE else None
    yield fact("scale_overflows_at_once", what, "loss_scaling.init_scale", severity, **words)


def _starting(case: ModelUnderTest, rule: LossScaling, scale: float) -> str:
    """How the loss scale starts at ``scale``, with a floor that lets it."""
    if case.policy is None:
        return f"the plugin MixedPrecision('16-mixed', device, torch.amp.GradScaler(device, init_scale={scale!r}))"
    floor = f", min_scale={min(1.0, scale)!r}" if rule.min_scale > scale else ""
    return f"LossScaling(init_scale={scale!r}{floor})" + ("" if rule.dynamic else ", a dynamic scale")


def accumulation_overflows(case: ModelUnderTest) -> Iterator[Finding]:
    """Scaled gradients whose sum over micro-batches, the scaled mean, leaves the format it is stored in."""
    rule, parts = case.scaling, int(case.argument("accumulate_grad_batches", 1))
    half = any(case.stored(parameter) == "fp16" for _, _, parameter in case.trained)
    dtype, limit = ("fp16", FP16_MAX) if half else ("fp32", FP32_MAX)
    if rule is None or parts <= 1 or rule.init_scale < limit:
        return
    # the power of 2 that leaves a factor of 16 below the limit
    lower = _starting(case, rule, 2.0 ** (math.floor(math.log2(limit / parts)) - 4))
    yield fact(
        "accumulation_overflows",
        f"{parts} micro-batches are summed in {dtype} at a loss scale of {rule.init_scale:g}",
        "accumulate_grad_batches",
        dtype=dtype,
        limit=limit,
        entry=limit / rule.init_scale,
        change=lower + (", or '16-mixed', whose gradients are fp32" if half else ""),
    )


# ---------------------------------------------------------------------- optimizers and schedules


def optimizer_eps_underflows(case: ModelUnderTest) -> Iterator[Finding]:
    """An ``eps`` that is 0 with fp16 state; fused kernels compute in fp32."""
    if not any(case.stored(parameter) == "fp16" for _, _, parameter in case.trained):
        return
    for optimizer in configured(case)[0]:
        groups = [group for group in optimizer.param_groups if not group.get("fused")]
        given = [g.get("eps") for g in groups if any(case.stored(parameter) == "fp16" for parameter in g["params"])]
        eps = [one for one in given if isinstance(one, float) and one > 0 and torch.tensor(one).half().item() == 0]
        if eps:
            name = type(optimizer).__name__
            what = f"{name}(eps={min(eps)!r}) with weights and state in fp16, where that is 0"
            yield fact("eps_underflows:optimizer", what, "configure_optimizers", optimizer=name)


def schedule_counts_skips(case: ModelUnderTest) -> Iterator[Finding]:
    """A schedule that goes on at steps that a stock loss scaler skips; a plan holds it."""
    if case.scaling is None or case.policy is not None:
        return
    names = [type(scheduler).__name__ for scheduler, interval in configured(case)[1] if interval == "step"]
    if names:
        what = f"{', '.join(names)} advances at every step, including those that the loss scaler skips"
        yield fact("schedule_counts_skips", what, "configure_optimizers", precision=case.precision)


def configured(case: ModelUnderTest) -> tuple[list[Optimizer], list[tuple[Any, str]]]:
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
    return _read(given)


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


# ---------------------------------------------------------------------- DeepSpeed's JSON


def deepspeed_contradicts_trainer(case: ModelUnderTest) -> Iterator[Finding]:
    """Every key of the JSON that contradicts plan or Trainer, with both values."""
    own: Any = case.strategy
    stock = DeepSpeedStrategy in type(own).__mro__
    config, stage, offloads = own, None, dict[str, bool]()
    if hasattr(own, "plan_engine") and stock:
        config, stage = own._given or {}, own._stage
        offloads = {"offload_optimizer": own._offloads[0], "offload_parameters": own._offloads[1]}
    elif stock:
        config = own.config
    if not isinstance(config, Mapping):
        return
    # Lightning's own strategy lets the JSON win where it does not refuse it
    stock = stock and stage is None
    json = cast("Mapping[str, Any]", config)
    stage = stage or int((json.get("zero_optimization") or {}).get("stage") or 1)
    faults = _faults(partial(_against_plan, case, json, stage, offloads))
    if case.trainer:
        faults += [fault for fault in _faults(partial(_against_trainer, case, json, stock)) if fault not in faults]
    for fault in faults:
        yield fact("deepspeed_contradicts_trainer", fault.given, fault.given.partition("=")[0], change=fault.fix)


def _faults(check: Callable[[], None]) -> list[Fault]:
    try:
        check()
    except PlanError as error:
        return list(error.faults)
    return []


def _against_plan(case: ModelUnderTest, json: Mapping[str, Any], stage: int, offloads: Mapping[str, bool]) -> None:
    """Raise what the JSON says otherwise than the plan does, or a precision of Lightning's."""
    if case.policy is not None:
        compose(case.policy, json, stage=stage, **offloads)
        return
    with Faults() as faults:
        for block in HALF:
            half = case.precision.startswith(block.removeprefix("fp"))
            if not half and (json.get(block) or {}).get("enabled") is True:
                given = f"{block}.enabled=True in the JSON and precision={case.precision!r} in the Trainer"
                faults.add(given, "the same in both", f"set {block}.enabled to false, or train in it")


def _against_trainer(case: ModelUnderTest, json: Mapping[str, Any], stock: bool) -> None:
    """Raise what the JSON says otherwise than the Trainer's arguments."""
    devices, nodes = case.argument("devices", "auto"), case.argument("num_nodes", 1)
    world = devices * nodes if isinstance(devices, int) and devices > 0 else None
    # without a known number of devices nothing can be said of the whole batch
    config = {key: value for key, value in json.items() if world is not None or key != "train_batch_size"}
    by_norm = case.argument("gradient_clip_algorithm", "norm") == "norm"
    accumulate = int(case.argument("accumulate_grad_batches", 1))
    clip = case.argument("gradient_clip_val") if by_norm else None
    add_trainer(config, clip_norm=clip, accumulate=accumulate, world_size=world or 1, micro_batch=None)
    if stock and _STEPS in config:
        given = f"{_STEPS}={config[_STEPS]!r} in the JSON and Trainer(accumulate_grad_batches={accumulate})"
        fix = f"remove {_STEPS} from the JSON: Lightning's DeepSpeedStrategy takes the Trainer's alone"
        raise PlanError([Fault(given, "the Trainer's alone", fix)])
