"""One forward and backward pass of a bare module, observed, and undone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mp.monitor.audit.judge import Declaration
from lightning_mp.monitor.audit.observer import Observed, Watch, note_gradients
from lightning_mp.monitor.side_run import loss_of, output_in, untouched
from lightning_mp.numerics.nested import floating_in
from lightning_mp.numerics.tf32 import set_tf32


def one_pass(
    modules: Mapping[str, nn.Module], batch: Any, declaration: Declaration, device: torch.device
) -> dict[str, Observed]:
    """What is seen while ``batch`` goes forward and backward as declared; the module is as before afterwards."""
    watch, module = Watch(modules), modules[""]
    with ExitStack() as stack:
        stack.enter_context(untouched(module, device))
        if declaration.tf32 is not None:
            stack.callback(set_tf32("high" if declaration.tf32 else "highest"))
        watch.start()
        stack.callback(watch.stop)
        autocast = declaration.compute if declaration.autocast else None
        loss = _scalar(output_in(module, batch, device, autocast=autocast, storage=declaration.storage))
        if loss is not None and loss.requires_grad:
            loss.backward()
        note_gradients(watch.seen, modules)
    return watch.seen


def _scalar(output: Any) -> Tensor | None:
    """The loss in ``output``, or the sum of its floating tensors."""
    loss = loss_of(output)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    summed = [tensor.float().sum() for tensor in floating_in(output)]
    return sum(summed[1:], summed[0]) if summed else None
