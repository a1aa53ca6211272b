"""Module-level dtypes for a project on stock plugins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from lightning_mp.callbacks.acting import ActingCallback
from lightning_mp.compat.lightning import LightningModule, Trainer
from lightning_mp.errors import Faults
from lightning_mp.modules import pins
from lightning_mp.numerics.dtypes import TORCH_DTYPES
from lightning_mp.policy import PinsLike, PrecisionPolicy
from lightning_mp.policy.words import DTYPES_OF


class DtypePinning(ActingCallback):
    """Stores and runs chosen modules in a dtype of their own, whatever the stock plugin does to the rest.

    ``pins`` are those of :class:`~lightning_mp.MixedPrecisionPlan`, ``{"*norm*": "fp32"}``. After the run every module
    has its own forward and its own dtypes back; going back to a narrower dtype rounds.

    Raises:
        PlanError: a pattern that matches nothing, contradicting pins on tied weights, or a MixedPrecisionPlan beside it
            (use its ``pins=``).
    """

    plan_field = "pins"

    def __init__(self, pins: PinsLike) -> None:
        super().__init__()
        self.pins = PrecisionPolicy(precision="32-true", pins=pins).pins  # pyright: ignore[reportArgumentType]

    def apply(self, trainer: Trainer, pl_module: LightningModule, faults: Faults) -> Callable[[], object] | None:
        """Pin the matching modules."""
        pin_map = pins.resolve(pl_module, self.pins, faults)
        precision = str(trainer.precision)
        if precision == "16-mixed" and any(member.pin.dtype == "fp16" for member in pin_map.members):
            faults.add(
                "a pin to fp16 under stock '16-mixed'",
                "pins to fp32 or bf16: torch's GradScaler unscales no fp16 gradients",
                "pin to 'bf16', or use MixedPrecisionPlan('16-mixed', pins=...), whose scaler does",
            )
        faults.raise_if_any()
        tensors = [
            (tensor, tensor.dtype)
            for member in pin_map.members
            for tensor in (*member.module.parameters(recurse=False), *member.module.buffers(recurse=False))
        ]
        compute = TORCH_DTYPES.get(DTYPES_OF.get(precision, DTYPES_OF["32-true"])[1], torch.float32)
        device_type = trainer.strategy.root_device.type
        mixed = precision.endswith("-mixed")
        pins.apply(pin_map, mixed=mixed, compute_dtype=compute, device_type=device_type)

        def give_back(modules: list[nn.Module]) -> None:
            pins.remove(modules)
            for tensor, dtype in tensors:
                tensor.data = tensor.data.to(dtype)

        return partial(give_back, [member.module for member in pin_map.members])
