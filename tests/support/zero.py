"""What each rank of a run under DeepSpeed does; the tests look at what came back."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_mp import LossScaling, MixedPrecisionPlan, NonFinite, NonFiniteError, make_strategy
from lightning_mp.strategies.deepspeed import forward
from support.collectives import Moved
from support.ddp import STATIC
from support.deepspeed_json import WHOLE_FP16
from support.fsdp2_halves import Penalised, Text, text
from support.models import Regression, batches
from support.oracles import plan_for
from support.running import fit, trainer
from support.saving import ResumableBatches, SaveAt
from support.sharded import Readings, Sick, refused, whole
from support.zero_models import RULES, Asked, ByHand, Groups, Language, Later, Small, Window

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


@contextmanager
def fp16_supported(supported: bool = True) -> Generator[None, None, None]:
    """DeepSpeed believes of the CPU what it believes of CUDA, or of a CPU without fp16 kernels."""
    from deepspeed.accelerator import get_accelerator

    kind: Any = type(get_accelerator())
    before = kind.is_fp16_supported
    kind.is_fp16_supported = lambda _: supported
    try:
        yield
    finally:
        kind.is_fp16_supported = before


@dataclass(frozen=True)
class Trained:
    """A run; ``bad``, ``optimizer``, ``rule``, ``pins`` and ``config`` of ``options`` are not the Trainer's."""

    stage: str | None
    mode: str
    options: dict[str, Any] = field(default_factory=dict)
    #: DeepSpeed's ``fp16.enabled`` is true, as it is there
    as_on_cuda: bool = False

    def run(self) -> dict[str, Any]:
        options = dict(self.options)
        module = Small(options.pop("bad", ()), options.pop("optimizer", "adamw"))
        plan = plan_for(self.mode, RULES.get(options.pop("rule", ""), STATIC), pins=options.pop("pins", None))
        own = {"config": options.pop("config", None)} if self.stage else {}
        readings, error = Readings(), None
        try:
            with fp16_supported() if self.as_on_cuda else nullcontext():
                fit(module, callbacks=[readings], **options, **on(plan, self.stage, **own))
        except NonFiniteError as raised:
            error = type(raised).__name__, raised.rank, raised.step, raised.module
        counts = plan.applied_steps, plan.skipped_steps
        found = {"weights": whole(module), "dtypes": _dtypes(module), "counts": counts, "error": error}
        return {**readings.found(), **found, "losses": module.losses}


def _dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in module.named_parameters()}


#: else ZeRO-3 keeps small parameters gathered, in fp32
NOTHING_WHOLE = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


@dataclass(frozen=True)
class HalfGathers:
    """A run that gathers in half precision what autocast alone computes with, and one that gathers as stored."""

    mode: str
    kind: str = "llama"

    def run(self) -> dict[str, Any]:
        runs = {"half": self._run(), "steps": self.moved.steps}
        with mock.patch.object(forward.half_weights, "survey", return_value=[]):
            return {**runs, "stored": self._run()}

    @cached_property
    def moved(self) -> Moved:
        return Moved()

    def _run(self) -> dict[str, Any]:
        module, plan = Text(self.kind), plan_for(self.mode)
        fit(module, data=text(), callbacks=[self.moved], **on(plan, "3", config=NOTHING_WHOLE))
        return {"losses": module.losses, "weights": whole(module)}


@dataclass(frozen=True)
class ReadsAWeight:
    """What is said of it under ZeRO-3."""

    def run(self) -> str:
        return refused(lambda: fit(Penalised(), **on(plan_for("16-mixed"), "3", config=NOTHING_WHOLE)))


SCALER = ("cur_scale", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis", "dynamic")


@dataclass(frozen=True)
class LongSpec:
    """What of a real project's fp16 block the engine and its scaler hold."""

    stage: str

    def run(self) -> dict[str, Any]:
        found: dict[str, Any] = {}

        class Asks(Small):
            def on_train_start(self) -> None:
                engine: Any = self.trainer.strategy.deepspeed_engine
                found["block"] = {key: getattr(engine._config.float16_config, key) for key in WHOLE_FP16}
                found["scaler"] = {key: getattr(engine.optimizer.loss_scaler, key) for key in SCALER}

        plan = MixedPrecisionPlan("16-mixed", loss_scaling=LossScaling.deepspeed(at_min="hold"))
        with fp16_supported():
            fit(Asks(), **on(plan, self.stage, config={"fp16": WHOLE_FP16}))
        return found


@dataclass(frozen=True)
class EveryStep:
    """Validate, train twice, validate, test, predict, train again with one module."""

    stage: str | None
    mode: str

    def run(self) -> dict[str, Any]:
        module, data = Asked(), batches()
        runner = trainer(**on(plan_for(self.mode, STATIC), self.stage))
        runner.validate(module, data, verbose=False)
        runner.fit(module, data, data)
        runner.fit_loop.max_epochs = 2
        runner.fit(module, data, data)
        runner.validate(module, data, verbose=False)
        runner.test(module, data, verbose=False)
        runner.predict(module, data)
        fit(module, **on(plan_for(self.mode, STATIC), self.stage))
        hooks = len(getattr(module.net[0].weight, "_post_accumulate_grad_hooks", None) or ())
        return {"losses": module.losses_of, "seen": module.seen, "weights": whole(module), "hooks": hooks}


@dataclass(frozen=True)
class Manual:
    """A run by hand, and the error it ended with."""

    stage: str | None
    mode: str
    clip: float | None = None
    backwards: int = 1

    def run(self) -> dict[str, Any]:
        module = ByHand(self.clip, self.backwards)
        try:
            fit(module, **on(plan_for(self.mode, STATIC), self.stage))
        except RuntimeError as error:
            return {"error": str(error)}
        return {"weights": whole(module), "under_autocast": module.under_autocast}


@dataclass(frozen=True)
class OwnScaler:
    """The scales of DeepSpeed's own scaler under a rule."""

    rule: str
    overflows: tuple[int, ...]

    def run(self) -> list[float]:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

        rule, found = RULES[self.rule], list[float]()
        arguments = rule.init_scale, rule.growth_interval, rule.min_scale, rule.hysteresis, rule.consecutive_hysteresis
        scaler = DynamicLossScaler(*arguments, raise_error_at_min_scale=False)
        for step in range(8):
            scaler.update_scale(step in self.overflows)
            found.append(scaler.cur_scale)
        return found


@dataclass(frozen=True)
class PlainLoop:
    """Torch alone over both ranks' data: fp16 autocast, and a scale that doubles on every other step."""

    def run(self) -> dict[str, Tensor]:
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
        return {name: parameter.detach() for name, parameter in module.named_parameters()}


@dataclass(frozen=True)
class Stopped:
    """The error each rank's run ended with."""

    stage: str
    mode: str
    how: str
    action: str

    def run(self) -> dict[str, Any]:
        rule = NonFinite(action="raise") if self.action == "raise" else NonFinite(max_consecutive=3)
        try:
            fit(Sick(self.how), **on(plan_for(self.mode, STATIC, nonfinite=rule), self.stage))
        except NonFiniteError as error:
            return {"rank": error.rank, "step": error.step, "module": error.module}
        return {}


@dataclass(frozen=True)
class Windows:
    """Windows of three micro-batches, the last of two, which is left out in the first of two epochs."""

    stage: str | None
    mode: str
    epochs: int = 1

    def run(self) -> dict[str, Any]:
        module, plan, readings = Window(), plan_for(self.mode, STATIC), Readings()
        fit(
            module,
            accumulate_grad_batches=3,
            max_epochs=self.epochs,
            callbacks=[readings],
            **on(plan, self.stage),
        )
        counts = plan.applied_steps, plan.skipped_steps
        return {"weights": whole(module), "skipped": readings.skipped, "counts": counts}


@dataclass(frozen=True)
class Resumed:
    """A run that saves after step 4, and another that goes on from there; step 1 is skipped."""

    stage: str | None
    mode: str
    schedule: str
    folder: Path

    @property
    def saved(self) -> Path:
        """The checkpoint."""
        return self.folder / f"{self.stage} {self.mode} {self.schedule}" / "4.ckpt"

    def run(self) -> dict[str, Any]:
        saving = SaveAt(self.saved.parent, 4)
        return {"whole": self._run((1,), callbacks=[saving]), "resumed": self._run(ckpt_path=self.saved)}

    def _run(self, bad: tuple[int, ...] = (), callbacks: Any = (), ckpt_path: Path | None = None) -> dict[str, Any]:
        plan = plan_for(self.mode, RULES["counters"], pins={"LayerNorm": "fp32"})
        module, readings, data = Groups(self.schedule, bad), Readings(), ResumableBatches()
        fit(module, data=data, callbacks=[readings, *callbacks], ckpt_path=ckpt_path, **on(plan, self.stage))
        counts = plan.applied_steps, plan.skipped_steps
        return {**readings.found(), "weights": whole(module), "counts": counts}


@dataclass(frozen=True)
class Crossed:
    """A run that goes on from another strategy's checkpoint."""

    stage: str | None
    path: Path

    def run(self) -> dict[str, Any]:
        plan, readings = plan_for("16-mixed", RULES["counters"], pins={"LayerNorm": "fp32"}), Readings()
        start: dict[str, Any] = {}

        class Start(Callback):
            def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
                start.update(start=whole(pl_module), counts=(plan.applied_steps, plan.skipped_steps))

        callbacks, data = [readings, Start()], ResumableBatches()
        fit(Groups("lambda"), data=data, callbacks=callbacks, ckpt_path=self.path, **on(plan, self.stage))
        return {**start, "rates": readings.rates, "scales": readings.scales}


@dataclass(frozen=True)
class Llama:
    """A small Llama, under LoRA unless told otherwise."""

    stage: str | None
    mode: str
    pins: dict[str, str]
    lora: bool = True
    checkpointing: str | None = None

    def run(self) -> dict[str, Any]:
        module = Language(self.lora)
        plan = plan_for(self.mode, STATIC, pins=self.pins, checkpointing=self.checkpointing)
        fit(module, **on(plan, self.stage))
        trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        found = {"weights": whole(module), "dtypes": _dtypes(module), "norms": module.norms, "losses": module.losses}
        return {**found, "trainable": trainable}


@dataclass(frozen=True)
class MadePartitioned:
    """A model that stage 3 partitions as it is made, on a device for which DeepSpeed has fp16 or has not."""

    stage: str | None
    mode: str
    pin: str | None = None
    fp16: bool = False

    def run(self) -> dict[str, Any]:
        module = Later(self.pin is not None)
        plan = plan_for(self.mode, STATIC, pins=None if self.pin is None else {"net.0": self.pin})
        with fp16_supported(self.fp16):
            fit(module, **on(plan, self.stage))
        return {"weights": whole(module), "dtypes": _dtypes(module)}


@dataclass(frozen=True)
class ProcessState:
    """What DeepSpeed could have left behind in this process."""

    when: str

    def run(self) -> dict[str, Any]:
        from deepspeed.runtime import torch_autocast
        from deepspeed.runtime.engine import DeepSpeedEngine

        return {
            "cast": DeepSpeedEngine._cast_module_mixed_precision.__qualname__,
            "linear": torch.nn.functional.linear.__module__,
            "autocast": (torch.is_autocast_enabled("cpu"), torch.get_default_dtype()),
            "globals": (torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE),
        }
