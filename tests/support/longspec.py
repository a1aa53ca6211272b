"""Runs ``experiment=longspec`` as the command does and notes what each rank sees of it, with torch's own means."""

from __future__ import annotations

import argparse
import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_mp.callbacks import PrecisionAudit
from lightning_mp.cli.training.application import train
from lightning_mp.demo.language_model import CausalLM
from lightning_mp.errors import LossScaleError
from lightning_mp.monitor.health.memory import memory
from support import hf
from support.deepspeed_json import WHOLE_FP16
from support.models import InfiniteGradient
from support.zero import fp16_supported

#: added to every run: a short text, and the callback that looks instead of those that write
LOOKING = (
    "+callbacks.look._target_=support.longspec.Look",
    "callbacks.training_health=null",
    f"data.text={argparse.__file__}",
    "data.val_batches=2",
    "trainer.num_sanity_val_steps=0",
    "trainer.enable_checkpointing=false",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
)
#: the batches in which operators, and then costs, are looked at: after the audit's
OPERATORS_AT, COSTS_AT = 2, 4
#: where LightningModule, peft and transformers put the Llama
PREFIX = "model.base_model.model."
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class Sick(CausalLM):
    """The loss is ``factor`` times what it is; gradients overflow on rank 1 alone in the steps ``overflow_at``."""

    def __init__(self, *given: Any, overflow_at: Sequence[int] = (), factor: float = 1.0, **options: Any) -> None:
        super().__init__(*given, **options)
        self.overflow_at, self.factor = overflow_at, factor

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * self.factor
        if self.global_rank == 1 and batch_idx // self.trainer.accumulate_grad_batches in self.overflow_at:
            trained = next(parameter for parameter in self.parameters() if parameter.requires_grad)
            loss = loss + InfiniteGradient.apply(trained.float().sum() * 0)
        return loss


class Operators(TorchDispatchMode):
    """Dtypes of what is computed, by the innermost module it is computed in; ``""`` is the backward pass."""

    def __init__(self, inside: list[str]) -> None:
        super().__init__()
        self.inside = inside
        self.products: dict[str, set[torch.dtype]] = defaultdict(set)
        self.others: dict[str, set[torch.dtype]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, where = func.overloadpacket.__name__, self.inside[-1] if self.inside else ""
        given = {each.dtype for each in args if isinstance(each, Tensor) and each.is_floating_point()}
        if "attention" in name:  # its logsumexp is fp32 in any dtype
            self.products[where].add(args[0].dtype)
        elif name in _PRODUCTS:
            self.products[where] |= given
        elif name in ("mul", "pow", "mean", "rsqrt", "add"):
            self.others[where] |= given
        return out


class Look(Callback):
    """Fills ``found``, plain data; ``last`` is the callback of the present run."""

    last: ClassVar[Look | None] = None

    def __init__(self) -> None:
        type(self).last = self
        self.found: dict[str, Any] = {"batches": [], "steps": [], "calls": Counter(), "gradients": set(), "norms": {}}
        self.dtypes: dict[str, set[tuple[Any, Any]]] = defaultdict(set)
        self.inside: list[str] = []
        self.module: Any = None
        self._stack = ExitStack()

    # ------------------------------------------------------------------ the run begins

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.module = pl_module
        self.found["start"], self.found["switches"] = _weights(pl_module), _switches()
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.found["before"] = memory(pl_module.device).allocated
        self.found["trained"] = {name for name, weight in pl_module.named_parameters() if weight.requires_grad}
        self.found["config"] = _engine_config(trainer)
        self.found["processes"] = dist.get_world_size(), dist.get_backend()
        for name, module in pl_module.named_modules():
            self._watch(name.removeprefix(PREFIX), module)
        for weight in pl_module.parameters():
            if weight.requires_grad:
                weight.register_hook(lambda gradient: self.found["gradients"].add(gradient.dtype))
        adamw: Any = trainer.optimizers[0].optimizer
        self.found["optimizer"] = type(adamw)
        adamw.register_step_pre_hook(self._step)

    def _watch(self, name: str, module: nn.Module) -> None:
        def enter(_module: nn.Module, _inputs: Any) -> None:
            self.inside.append(name)
            again = torch._C._current_graph_task_id() != -1
            self.found["calls"][name, "again" if again else "first"] += 1

        def leave(_module: nn.Module, inputs: Any, output: Any) -> None:
            self.inside.pop()
            tensors = [given for given in inputs if isinstance(given, Tensor)]
            if tensors and isinstance(output, Tensor):
                self.dtypes[name].add((tensors[0].dtype, output.dtype))
            if name.endswith("norm") and output is not None and len(self.found["norms"]) < 1:
                self.found["norms"][name] = tensors[0].detach().cpu(), output.detach().cpu()
            if name == "lm_head" and output.requires_grad and "logits gradient" not in self.found:
                output.register_hook(lambda gradient: self.found.setdefault("logits gradient", gradient.cpu()))
            if hasattr(output, "past_key_values"):
                self.found["cached"] = output.past_key_values is not None

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)

    def _step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """What the AdamW inside of ZeRO is about to step on."""
        masters = [master for group in optimizer.param_groups for master in group["params"]]
        squares = torch.stack([master.grad.double().pow(2).sum() for master in masters]).sum()
        dist.all_reduce(squares)
        group = optimizer.param_groups[0]
        self.found["steps"].append(
            {
                **{key: group[key] for key in ("lr", "betas", "eps", "weight_decay")},
                "norm": squares.sqrt().item(),
                "masters": {master.dtype for master in masters},
                "numbers": sum(master.numel() for master in masters),
            }
        )

    # ------------------------------------------------------------------ batches

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self._first = batch
            self.found["losses"] = [self._loss_of_first(trainer, pl_module)]
        if batch_idx == OPERATORS_AT:
            self.operators = self._stack.enter_context(Operators(self.inside))
        if batch_idx == COSTS_AT:
            self.flops = self._stack.enter_context(FlopCounterMode(display=False))
            self.saved: dict[int, tuple[torch.dtype, int]] = {}
            own = {weight.untyped_storage().data_ptr() for weight in pl_module.parameters()}
            self._forward = ExitStack()
            self._forward.enter_context(saved_tensors_hooks(lambda tensor: self._save(tensor, own), lambda kept: kept))

    def _loss_of_first(self, trainer: Trainer, module: Any) -> float:
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            return nn.functional.cross_entropy(
                module.model(input_ids=self._first[:, :-1]).logits.float().flatten(0, 1), self._first[:, 1:].flatten()
            ).item()

    def _save(self, tensor: Tensor, own: set[int]) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            self.saved[storage.data_ptr()] = tensor.dtype, storage.nbytes()
        return tensor

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if hasattr(self, "_forward"):
            self._forward.close()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stack.close()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        plan: Any = trainer.precision_plugin
        loss = outputs["loss"].item() * trainer.accumulate_grad_batches
        self.found["batches"].append(
            {
                "shape": tuple(batch.shape),
                "loss": loss,
                "peak": memory(pl_module.device).peak,
                "step": trainer.global_step,
                "applied": plan.applied_steps,
                "skipped": plan.skipped_steps,
                "scale": None if plan.scaler is None else plan.scaler.get_scale(),
                "norm": None if plan.last_grad_norm is None else plan.last_grad_norm.item(),
                "use_cache": pl_module.model.config.use_cache,
            }
        )

    # ------------------------------------------------------------------ the run is over

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        adamw: Any = trainer.optimizers[0].optimizer
        states = (value for state in adamw.state.values() for key, value in state.items() if key != "step")
        self.found["state"] = {value.dtype for value in states}
        self.found["end"] = _weights(pl_module)
        self.found["losses"].append(self._loss_of_first(trainer, pl_module))
        audit = next(callback for callback in trainer.callbacks if isinstance(callback, PrecisionAudit))
        self.found["audit"] = audit.report.to_dict()

    def close(self) -> dict[str, Any]:
        """All that was found, once the Trainer has let go of everything."""
        found = {**self.found, "dtypes": dict(self.dtypes), "calls": dict(self.found["calls"])}
        found["use_cache after"] = self.module.model.config.use_cache
        found["switches after"] = _switches()
        if hasattr(self, "operators"):
            found["products"], found["others"] = dict(self.operators.products), dict(self.operators.others)
        if hasattr(self, "flops"):
            found["flops"], found["saved"] = self.flops.get_total_flops(), list(self.saved.values())
        return found


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().cpu().clone() for name, weight in module.named_parameters()}


def _switches() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def _engine_config(trainer: Trainer) -> dict[str, Any]:
    """What the DeepSpeedEngine holds, not what it was given."""
    engine: Any = trainer.strategy.deepspeed_engine
    return {
        "fp16": {key: getattr(engine._config.float16_config, key) for key in WHOLE_FP16},
        "stage": engine.zero_optimization_stage(),
        "clipping": engine.gradient_clipping(),
        "accumulation": engine.gradient_accumulation_steps(),
    }


# ---------------------------------------------------------------------- in each rank


@dataclass(frozen=True)
class Experiment:
    """Trains as ``lightning-mp train`` does, with DeepSpeed as it is on CUDA; what was seen, and how it ended."""

    arguments: tuple[str, ...]
    folder: Path

    def run(self) -> dict[str, Any]:
        os.environ["XDG_CACHE_HOME"] = str(self.folder.parent)
        Look.last, ended = None, "finished"
        with fp16_supported():
            try:
                assert train([*self.arguments, f"run_dir={self.folder}", *LOOKING], lambda _: None) == 0
            except LossScaleError as error:
                ended = str(error)
        assert Look.last is not None
        found = Look.last.close()
        return {**found, "ended": ended, "theirs": deepspeeds_scales(found)}


def deepspeeds_scales(found: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's own scale after each step, with the engine's block and the overflows that a run had; then another."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    block, every = found["config"]["fp16"], found["config"]["accumulation"]
    scaler = DynamicLossScaler(
        init_scale=2.0 ** block["initial_scale_power"],
        scale_window=block["loss_scale_window"],
        min_scale=block["min_loss_scale"],
        delayed_shift=block["hysteresis"],
        consecutive_hysteresis=block["consecutive_hysteresis"],
    )
    skips = [0, *(batch["skipped"] for batch in found["batches"][every - 1 :: every])]
    scales: list[float] = []
    for before, now in itertools.pairwise(skips):
        scaler.update_scale(now > before)
        scales.append(scaler.cur_scale)
    try:
        scaler.update_scale(True)
    except Exception as error:
        return {"scales": scales, "then": str(error)}
    return {"scales": scales, "then": ""}


@dataclass(frozen=True)
class DeepSpeedAlone:
    """Dtypes of a Llama whose norms were cast to fp32, once DeepSpeed's own fp16 engine has it."""

    def run(self) -> dict[str, torch.dtype]:
        import deepspeed

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        model = hf.llama(lora=True)
        for name, module in model.named_modules():
            if "norm" in name:
                module.float()
        config: Any = {"train_micro_batch_size_per_gpu": 1, "fp16": WHOLE_FP16, "zero_optimization": {"stage": 1}}
        config["zero_allow_untested_optimizer"] = True
        optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
        with fp16_supported():
            deepspeed.initialize(model=model, config=config, optimizer=optimizer)
        return {name: weight.dtype for name, weight in model.named_parameters()}
