"""Runs under ZeRO-1 and 2 that hold half copies, beside the same that hold fp32 weights."""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from lightning_mp import NonFiniteError, PlanError
from lightning_mp.modules.half_copies import HalfCopy
from lightning_mp.strategies.deepspeed import shadow_weights
from support.collectives import Moved
from support.fsdp2_halves import AskingMany, Many, Text, text
from support.models import FEATURES
from support.oracles import plan_for
from support.running import fit
from support.sharded import Ranked, whole
from support.zero import on


class Looks(Callback):
    """Notes what ZeRO's optimizer holds when training ends; all ranks have the whole of it."""

    def __init__(self) -> None:
        self.held = 0
        self.copies: list[str] = []
        self.rates: list[float] = []
        self.masters: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = {}

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        from deepspeed.utils import safe_get_full_fp32_param

        zero = trainer.optimizers[0]
        self.held = sum(flat.nbytes for flat in zero.bit16_groups_flat)
        self.rates = [group["lr"] for group in zero.param_groups]
        for name, parameter in pl_module.named_parameters():
            if isinstance(parameter, HalfCopy):
                self.copies.append(name)
            self.masters[name] = safe_get_full_fp32_param(parameter)
            self.state[name] = _moment(zero, parameter)


def _moment(zero: Any, parameter: Any) -> Tensor:
    """AdamW's first moment of a parameter, from the ranks that have it."""
    whole, mapping = torch.zeros(parameter.numel()), parameter._hp_mapping
    if mapping is not None:
        flat = zero.optimizer.state[zero.single_partition_of_fp32_groups[mapping.param_group_index]]["exp_avg"]
        here, there = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
        whole[here.start : here.start + here.numel] = flat[there.start : there.start + there.numel]
    dist.all_reduce(whole)
    return whole


class Shared(Ranked):
    """One layer used three times, within blocks that are recomputed or not; a head whose gradients are largest."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        torch.manual_seed(0)
        self.inside = nn.Linear(16, 16)
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), _Twice(self.inside), _Twice(self.inside), nn.Linear(16, 1))


class _Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).relu()).relu() + self.layer(x)


class Grouped(Many):
    """A group without a vector first, then the others; a step sets the second group's rate by its place."""

    def configure_optimizers(self) -> Any:
        parts = [p for p in self.parameters() if p.dim() > 1], [p for p in self.parameters() if p.dim() < 2]
        return torch.optim.AdamW([{"params": part, "lr": 1e-2} for part in parts], eps=1e-4)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        cast("Any", self.optimizers()).param_groups[0]["lr"] = 1e-2 / (1 + batch_idx)


def _hooked() -> LightningModule:
    module = Many()
    module.net[2].weight.register_hook(lambda gradient: gradient * 3.0)
    return module


def _hooked_late() -> LightningModule:
    module = Many()

    def register() -> None:
        for weight in (module.net[2].weight, module.net[0].one.weight):  # the latter is used several times
            weight.register_hook(lambda gradient: gradient * 3.1)

    module.on_train_start = register
    return module


MODULES: dict[str, Callable[[], LightningModule]] = {
    "llama": lambda: Text("llama"),
    "gpt2": lambda: Text("gpt2"),
    "kinds": Many,
    "asking": AskingMany,
    "skips": lambda: Many(bad=(1, 3)),
    "shared": Shared,
    "grouped": Grouped,
    "hooked": _hooked,
    "hooked late": _hooked_late,
}


@dataclass(frozen=True)
class Copied:
    """One kind of module, with half copies and without."""

    kind: str
    stage: str
    mode: str = "bf16-mixed"
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        return {"half": self._run(True), "fp32": self._run(False)}

    def _run(self, half: bool) -> dict[str, Any]:
        options = dict(self.options)
        plan = plan_for(self.mode, **{key: options.pop(key) for key in ("checkpointing", "pins") if key in options})
        strategy = {key: options.pop(key) for key in ("config", "offload_optimizer") if key in options}
        module, looks, moved = MODULES[self.kind](), Looks(), Moved()
        data = text() if isinstance(module, Text) else None
        trainer = fit(
            module, data=data, callbacks=[looks, moved], **options, **on(plan, self.stage, half_copies=half, **strategy)
        )
        return {
            **{key: getattr(looks, key) for key in ("held", "copies", "rates", "masters", "state")},
            "losses": module.losses,
            "weights": whole(module),
            "gathered": sum(moved.steps[2]["gathered"]),
            "counts": (plan.applied_steps, plan.skipped_steps, trainer.global_step),
        }


# ------------------------------------------------------------------ who reads or writes a copy


def _in_the_step(module: Many) -> None:
    loss = module.loss
    module.loss = lambda batch: loss(batch) + module.net[2].weight.float().pow(2).sum()


def _without_autocast(module: Many) -> None:
    head = module.net[2]

    def fp32(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return nn.Linear.__call__(head, x.float())

    module.net.append(nn.Identity())
    module.net.forward = lambda x: fp32(module.net[1](module.net[0](x)))


def _writes(module: Many) -> None:
    module.on_train_batch_end = lambda *_: module.net[2].weight.data.clamp_(-0.1, 0.1)


def _copies(module: Many) -> None:
    module.on_train_batch_end = lambda *_: torch.no_grad()(module.net[2].weight.mul_)(0.9)


STRANGERS: dict[str, Callable[[Many], None]] = {
    "in the step": _in_the_step,
    "without autocast": _without_autocast,
    "writes to .data": _writes,
    "writes in place": _copies,
}


@dataclass(frozen=True)
class Strangers:
    """What is said to code that takes a copy for the weight."""

    def run(self) -> dict[str, str]:
        return {way: self._said(change) for way, change in STRANGERS.items()}

    def _said(self, change: Callable[[Many], None]) -> str:
        module = Many()
        change(module)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            try:
                fit(module, **on(plan_for("bf16-mixed"), "1"))
            except (PlanError, RuntimeError) as error:
                return str(error)
        return "nothing was said"


@dataclass(frozen=True)
class NotTaken:
    """DeepSpeed fails where it takes the module: its weights before and afterwards."""

    def run(self) -> dict[str, Any]:
        module = Many()
        before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        with mock.patch("deepspeed.initialize", side_effect=RuntimeError("of DeepSpeed's own")):
            try:
                fit(module, **on(plan_for("bf16-mixed"), "1"))
            except RuntimeError as error:
                said = str(error)
        return {"said": said, "before": before, "after": dict(module.named_parameters())}


# ------------------------------------------------------------------ runs that fail

FAILURES: dict[str, Callable[[], BaseException]] = {
    "an error": lambda: RuntimeError("of the user's own"),
    "Ctrl-C": KeyboardInterrupt,
    "NaN": lambda: NonFiniteError("a loss of the user's own"),
}


@dataclass(frozen=True)
class Failed:
    """A run that ends in step 3 by an exception, with shadow weights and without; on rank 1 it comes later."""

    stage: str
    how: str
    late: float = 0.0

    def run(self) -> dict[str, Any]:
        with mock.patch.object(shadow_weights, "PATIENCE", 1.0 if self.late else shadow_weights.PATIENCE):
            return {"half": self._run(True), "fp32": {} if self.late else self._run(False)}

    def _run(self, half: bool) -> dict[str, Any]:
        module, said = Many(), list[str]()
        step = module.training_step

        def fails(batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                time.sleep(self.late * dist.get_rank())
                raise FAILURES[self.how]()
            return step(batch, batch_idx)

        module.training_step = fails
        interrupt = signal.getsignal(signal.SIGINT)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                fit(module, **on(plan_for("bf16-mixed"), self.stage, half_copies=half))
            except BaseException as error:
                said.append(type(error).__name__)
            finally:
                signal.signal(signal.SIGINT, interrupt)  # Lightning leaves it ignored
        said += [str(one.message) for one in caught if "half-precision values" in str(one.message)]
        weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        return {"weights": weights, "said": said, "kinds": {type(one) for one in module.parameters()}}
