"""What each rank of a two-process run under DeepSpeed does; the tests look at what came back."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_mp import LossScaling, MixedPrecisionPlan, NonFinite, NonFiniteError, make_strategy
from support.ddp import STATIC, Sick
from support.deepspeed_json import WHOLE_FP16
from support.models import Regression, batches
from support.oracles import plan_for
from support.running import fit, trainer
from support.saving import ResumableBatches, SaveAt
from support.zero_models import RULES, Asked, ByHand, Groups, Language, Later, Small, Watch, Window

ZERO = {
    "1": "deepspeed_zero1",
    "2": "deepspeed_zero2",
    "3": "deepspeed_zero3",
    "2 offload": "deepspeed_zero2_offload",
    "3 offload": "deepspeed_zero3_offload",
}


def on(plan: MixedPrecisionPlan, stage: str | None, **options: Any) -> dict[str, Any]:
    """Trainer arguments for a ZeRO stage; for DDP, the comparison, where ``stage`` is None."""
    if stage is None:
        options = {"process_group_backend": "gloo"}
    strategy = make_strategy("ddp" if stage is None else ZERO[stage], plan, timeout=timedelta(seconds=60), **options)
    return {"plugins": [plan], "strategy": strategy, "devices": 2, "use_distributed_sampler": False}


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter, gathered where stage 3 split it."""
    from deepspeed.runtime.zero import GatheredParameters

    parameters = dict(module.named_parameters())
    split = [parameter for parameter in parameters.values() if hasattr(parameter, "ds_id")]
    with GatheredParameters(split, enabled=bool(split)):
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def trained(stage: str | None, mode: str, **options: Any) -> dict[str, Any]:
    """A run: ``bad``, ``optimizer``, ``rule``, ``pins`` and ``config`` are its own, the rest is the Trainer's."""
    module = Small(options.pop("bad", ()), options.pop("optimizer", "adamw"))
    plan = plan_for(mode, RULES.get(options.pop("rule", ""), STATIC), pins=options.pop("pins", None))
    own = {"config": options.pop("config", None)} if stage else {}
    watch, error = Watch(), None
    try:
        fit(module, callbacks=[watch], **options, **on(plan, stage, **own))
    except NonFiniteError as raised:
        error = type(raised).__name__, raised.rank, raised.step, raised.module
    counts = plan.applied_steps, plan.skipped_steps
    found = {"weights": weights(module), "dtypes": _dtypes(module), "counts": counts, "error": error}
    return {**watch.found(), **found, "losses": module.losses}


def _dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in module.named_parameters()}


@contextmanager
def fp16_supported() -> Generator[None, None, None]:
    """DeepSpeed believes of the CPU what it believes of CUDA."""
    from deepspeed.accelerator import get_accelerator

    kind: Any = type(get_accelerator())
    before = kind.is_fp16_supported
    kind.is_fp16_supported = lambda _: True
    try:
        yield
    finally:
        kind.is_fp16_supported = before


def trained_as_on_cuda(stage: str, mode: str, **options: Any) -> dict[str, Any]:
    """A run with ``fp16.enabled`` true."""
    with fp16_supported():
        return trained(stage, mode, **options)


SCALER = ("cur_scale", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis", "dynamic")


def longspec(stage: str) -> dict[str, Any]:
    """What of a real project's fp16 block the engine and its scaler hold."""
    found: dict[str, Any] = {}

    class Asks(Small):
        def on_train_start(self) -> None:
            engine: Any = self.trainer.strategy.deepspeed_engine
            found["block"] = {key: getattr(engine._config.float16_config, key) for key in WHOLE_FP16}
            found["scaler"] = {key: getattr(engine.optimizer.loss_scaler, key) for key in SCALER}

    plan = MixedPrecisionPlan("16-mixed", loss_scaling=LossScaling.deepspeed(at_min="hold"))
    with fp16_supported():
        fit(Asks(), **on(plan, stage, config={"fp16": WHOLE_FP16}))
    return found


def every_step(stage: str | None, mode: str) -> dict[str, Any]:
    """Validate, train twice, validate, test, predict, train again with one module."""
    module, plan = Asked(), plan_for(mode, STATIC)
    runner, data = trainer(**on(plan, stage)), batches()
    runner.validate(module, data, verbose=False)
    runner.fit(module, data, data)
    runner.fit_loop.max_epochs = 2
    runner.fit(module, data, data)
    runner.validate(module, data, verbose=False)
    runner.test(module, data, verbose=False)
    runner.predict(module, data)
    fit(module, **on(plan_for(mode, STATIC), stage))
    hooks = len(getattr(module.net[0].weight, "_post_accumulate_grad_hooks", None) or ())
    return {"losses": module.losses_of, "seen": module.seen, "weights": weights(module), "hooks": hooks}


def manual(stage: str | None, mode: str, clip: float | None = None, backwards: int = 1) -> dict[str, Any]:
    """A run by hand, and the error it ended with."""
    module = ByHand(clip, backwards)
    try:
        fit(module, **on(plan_for(mode, STATIC), stage))
    except RuntimeError as error:
        return {"error": str(error)}
    return {"weights": weights(module), "under_autocast": module.under_autocast}


def own_scaler(rule: str, overflows: list[bool]) -> list[float]:
    """The sequence of DeepSpeed's own scaler under that rule."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    said = RULES[rule]
    arguments = said.init_scale, said.growth_interval, said.min_scale, said.hysteresis, said.consecutive_hysteresis
    scaler, found = DynamicLossScaler(*arguments, raise_error_at_min_scale=False), list[float]()
    for overflow in overflows:
        scaler.update_scale(overflow)
        found.append(scaler.cur_scale)
    return found


def plain_loop() -> dict[str, Tensor]:
    """Torch alone over both ranks' data: fp16 autocast, and a scale that doubles on every other step."""
    module, scale = Small(), RULES["grows"].init_scale
    optimizer = module.make_optimizer(module.parameters())
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            losses = [Regression.loss(module, (x * rank, y)) for rank in (1, 2)]
        for loss in losses:
            (loss * scale).backward()
        for parameter in module.parameters():
            parameter.grad.div_(2 * scale)
        optimizer.step()
        scale *= 2 if step % 2 else 1
    return weights(module)


def stopped(stage: str, mode: str, how: str, action: str) -> dict[str, Any]:
    """The error each rank's run ended with."""
    rule = NonFinite(action="raise") if action == "raise" else NonFinite(max_consecutive=3)
    try:
        fit(Sick(how), **on(plan_for(mode, STATIC, nonfinite=rule), stage))
    except NonFiniteError as error:
        return {"rank": error.rank, "step": error.step, "module": error.module}
    return {}


def window(stage: str | None, mode: str) -> dict[str, Any]:
    """Windows of three micro-batches, the last of two."""
    module, plan, watch = Window(), plan_for(mode, STATIC), Watch()
    fit(module, accumulate_grad_batches=3, callbacks=[watch], **on(plan, stage))
    counts = plan.applied_steps, plan.skipped_steps
    return {"weights": weights(module), "skipped": watch.skipped, "counts": counts}


def resumed(stage: str | None, mode: str, schedule: str, folder: str) -> dict[str, Any]:
    """A run that saves after step 4, and another that goes on from there; step 1 is skipped."""
    found: dict[str, Any] = {}
    path = Path(folder) / f"{stage} {mode} {schedule}"
    for name, ckpt in (("whole", None), ("resumed", path / "4.ckpt")):
        plan = plan_for(mode, RULES["counters"], pins={"LayerNorm": "fp32"})
        module, watch = Groups(schedule), Watch()
        saving = [SaveAt(path, 4)] if ckpt is None else []
        fit(module, data=ResumableBatches(), callbacks=[watch, *saving], ckpt_path=ckpt, **on(plan, stage))
        counts = plan.applied_steps, plan.skipped_steps
        found[name] = {**watch.found(), "weights": weights(module), "counts": counts, "seen": module.lrs}
    return found


def crossed(stage: str | None, path: str) -> dict[str, Any]:
    """Go on from another strategy's checkpoint."""
    plan, module, watch = plan_for("16-mixed", RULES["counters"], pins={"LayerNorm": "fp32"}), Groups("lambda"), Watch()
    start: dict[str, Tensor] = {}

    class Start(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            start.update(weights(pl_module))
            self.counts = plan.applied_steps, plan.skipped_steps

    began = Start()
    fit(module, data=ResumableBatches(), callbacks=[watch, began], ckpt_path=path, **on(plan, stage))
    return {"start": start, "counts": began.counts, "rates": watch.rates, "scales": watch.scales}


def language(
    stage: str | None, mode: str, pins: dict[str, str], lora: bool = True, checkpointing: str | None = None
) -> dict[str, Any]:
    """Train it."""
    module = Language(lora)
    plan = plan_for(mode, STATIC, pins=pins, checkpointing=checkpointing)
    fit(module, **on(plan, stage))
    trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    found = {"weights": weights(module), "dtypes": _dtypes(module), "norms": module.norms, "losses": module.losses}
    return {**found, "trainable": trainable}


def made_partitioned(stage: str | None, mode: str, pin: str | None = None) -> dict[str, Any]:
    """A model that stage 3 partitions as it is made."""
    module, plan = Later(pin is not None), plan_for(mode, STATIC, pins=None if pin is None else {"net.0": pin})
    fit(module, **on(plan, stage))
    return {"weights": weights(module), "dtypes": _dtypes(module)}


def process_state() -> dict[str, Any]:
    """What DeepSpeed could have left behind in this process."""
    from deepspeed.runtime import torch_autocast
    from deepspeed.runtime.engine import DeepSpeedEngine

    return {
        "cast": DeepSpeedEngine._cast_module_mixed_precision.__qualname__,
        "linear": torch.nn.functional.linear.__module__,
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_default_dtype()),
        "globals": (torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE),
    }


def run(scenarios: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]]) -> bytes:
    """Each (key, function, arguments, keywords) in turn; a failing one leaves its traceback, and the others run."""
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    results: dict[str, Any] = {"process before": process_state()}
    for key, function, arguments, keywords in scenarios:
        results[key] = _or_traceback(function, arguments, keywords)
    results["process after"] = process_state()
    return pickle.dumps(results)


def _or_traceback(function: str, arguments: Any, keywords: Any) -> Any:
    try:
        return globals()[function](*arguments, **keywords)
    except Exception:
        return traceback.format_exc()
