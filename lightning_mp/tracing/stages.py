"""The first stage of a pipeline on one device: as many micro-batches in flight as its schedule has."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from lightning_mp.compat.lightning import LightningModule
from lightning_mp.errors import Faults
from lightning_mp.planner.prediction import MemoryPrediction
from lightning_mp.precision import MixedPrecisionPlan
from lightning_mp.strategies.pipeline.schedules import Layout, split
from lightning_mp.strategies.pipeline.stages import cut, leaves
from lightning_mp.tracing.run import traced


def first_stage(
    module: LightningModule, batch: Any, plan: MixedPrecisionPlan, layout: Layout, trainer_args: Mapping[str, Any]
) -> MemoryPrediction:
    """What the first rank holds, whose stage has most micro-batches in flight; ``batch`` is a whole one.

    Raises:
        PlanError: the module cannot be cut.
        Exception: what a trace raises.
    """
    with Faults("predict_memory") as faults:
        found = cut(module, layout.count, faults)
    assert found is not None
    total = sum(parameter.numel() for parameter in module.parameters())
    own = sum(one.numel() for name, one in module.named_parameters() if found.parameters[name] <= 0)
    # once the first micro-batch has gone backward, its gradients lie beside the next ones' activations
    beside = {"accumulate_grad_batches": 1 if layout.in_flight == layout.microbatches else 2}
    with _steps(module, layout):
        seen = traced(module, batch, plan, {**trainer_args, **beside, "devices": 1})
    elsewhere = round(seen.held["parameters"] * (1 - own / total))
    held, parts = ({**each, "parameters": each["parameters"] - elsewhere} for each in (seen.held, seen.parts))
    return MemoryPrediction(seen.peak_bytes - elsewhere, parts, held, "traced", ("the first stage",))


@contextmanager
def _steps(module: LightningModule, layout: Layout) -> Generator[None, None, None]:
    """Within it the module's step is what its first stage does; a copy of the module has it too."""

    def step(self: Any, batch: Any, batch_idx: int = 0) -> Tensor:
        stage = cut(self, layout.count, Faults())
        assert stage is not None
        inputs = self.pipeline_batch(batch)[0]
        pieces = split(inputs if isinstance(inputs, tuple) else (inputs,), layout.microbatches)
        first, cached = stage.make(0, layout.count), torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # every micro-batch casts the weights for itself
        try:
            outputs = [first(*piece) for piece in pieces[: layout.in_flight]]
        finally:
            torch.set_autocast_cache_enabled(cached)
        floating = [leaf for leaf in leaves(outputs) if leaf.is_floating_point()]
        return torch.stack([leaf.float().sum() for leaf in floating]).sum()

    before = vars(module).get("training_step")
    vars(module)["training_step"] = MethodType(step, module)
    try:
        yield
    finally:
        del vars(module)["training_step"]
        if before is not None:
            vars(module)["training_step"] = before
