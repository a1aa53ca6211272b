"""One forward and backward pass of a bare module, watched, and undone."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_mp.compat.lightning import LightningModule
from lightning_mp.monitor.audit.judge import Declaration
from lightning_mp.monitor.audit.observer import Observed, Watch, note_gradients
from lightning_mp.monitor.preserve import untouched
from lightning_mp.numerics.dtypes import HALF, cast_floating, default_dtype, to_torch
from lightning_mp.numerics.nested import floating_in
from lightning_mp.numerics.rng import rng_state, set_rng_state
from lightning_mp.numerics.tf32 import set_tf32


def one_pass(
    modules: Mapping[str, nn.Module], batch: Any, declaration: Declaration, device: torch.device
) -> dict[str, Observed]:
    """What is seen while ``batch`` goes forward and backward as declared; the module is as before afterwards."""
    watch, module = Watch(modules), modules[""]
    with ExitStack() as stack:
        stack.enter_context(untouched(module))
        stack.callback(set_rng_state, rng_state(device), device)
        if declaration.tf32 is not None:
            stack.callback(set_tf32("high" if declaration.tf32 else "highest"))
        watch.start()
        stack.callback(watch.stop)
        with ExitStack() as forward:
            _enter_context(forward, declaration, device)
            storage = None if declaration.storage in (None, "fp64") else to_torch(declaration.storage)
            half = storage if storage in HALF and not declaration.autocast else None
            loss = _loss(_forward(module, batch if half is None else cast_floating(batch, half)))
        if loss is not None and loss.requires_grad:
            loss.backward()
        note_gradients(watch.seen, modules)
    return watch.seen


def _enter_context(stack: ExitStack, declaration: Declaration, device: torch.device) -> None:
    if declaration.autocast and declaration.compute is not None:
        stack.enter_context(torch.autocast(device.type, to_torch(declaration.compute), cache_enabled=False))
    elif declaration.storage in ("bf16", "fp16"):
        stack.enter_context(default_dtype(to_torch(declaration.storage)))


def _forward(module: nn.Module, batch: Any) -> Any:
    if isinstance(module, LightningModule) and type(module).training_step is not LightningModule.training_step:
        with warnings.catch_warnings():  # there is nowhere to log to
            warnings.filterwarnings("ignore", r"You are trying to `self\.log\(\)`")
            return module.training_step(batch, 0)
    if isinstance(batch, Mapping):
        return module(**cast("Mapping[str, Any]", batch))
    return module(*batch) if isinstance(batch, (tuple, list)) else module(batch)


def _loss(output: Any) -> Tensor | None:
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    parts = [part.float().sum() for part in floating_in(output)]
    return sum(parts[1:], parts[0]) if parts else None
