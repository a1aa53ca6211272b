"""The scales with which FP8 layers round, read on the device.

A scale is the largest number of the format divided by the largest magnitude. Every forward pass
computes it anew. A falling scale means that numbers grow, towards overflow and NaN. A rising scale
means that they shrink, and small numbers become zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mp.compat import torchao
from lightning_mp.health.measurement import Layout, Measured, Values
from lightning_mp.modules import fp8
from lightning_mp.modules.fp8 import ROLES, Role

#: Every n-th reading has scales. They cost a pass over each layer's input, weight and gradient.
READINGS_BETWEEN = 2
#: scales by the layer's name and the role of the scaled tensor
Scales = Mapping[tuple[str, Role], float]
_PREFIX = "fp8_scale"
#: the magnitude of a tensor that this rank has not seen
_UNSEEN = -1.0


class FP8Scales:
    """The scales of all FP8 layers below ``module``, over all ranks.

    Each tensor has one scale. Under a recipe with a scale for each row it is the smallest of them.
    Without FP8 layers nothing is read.
    """

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device, world: int) -> None:
        self._layers, self._running = fp8.converted(module)
        self._keys: list[tuple[str, Role]] = [(name, role) for name in self._layers for role in ROLES]
        self._layout, self._device, self._world = layout, device, world
        #: the largest magnitudes of the layers' weights in this reading, in the order of the layers
        self._weights: Tensor | None = None
        #: readings that have begun
        self._readings = 0

    @property
    def active(self) -> bool:
        """True from the start of a reading with scales to its end."""
        return self._running is not None and self._running.magnitudes.active

    def begin(self) -> None:
        """Begin a reading. Collect magnitudes if this reading has scales."""
        self.stop()
        if self._running is not None:
            self._running.magnitudes.active = self._readings % READINGS_BETWEEN == 0
        self._readings += 1

    def stop(self) -> None:
        """Stop collecting, and drop the collected magnitudes."""
        self._weights = None
        if self._running is not None:
            self._running.magnitudes.take()

    @torch.no_grad()
    def before_step(self) -> None:
        """Read the weights before the first step of a reading. Later calls do nothing."""
        if not self.active or self._weights is not None:
            return
        shards = [self._layout.parameter(layer.get_parameter("weight")).tensor for layer in self._layers.values()]
        found = [fp8.largest_magnitude(shard) if shard.numel() else shard.new_full((), _UNSEEN) for shard in shards]
        largest = torch.stack([magnitude.float() for magnitude in found])
        if self._device.type == "cuda" and largest.device.type == "cpu":  # offloaded weights
            largest = largest.pin_memory()  # a copy from pageable memory waits for the device
        self._weights = largest.to(self._device, non_blocking=True)

    @torch.no_grad()
    def take(self) -> Measured:
        """End the reading. Return device scalars for :meth:`split`, empty without scales.

        A collective if the reading has scales. All ranks have them in the same readings.
        """
        if self._running is None or not self.active:
            return {}
        seen = self._running.magnitudes.take()
        unseen = torch.full((), _UNSEEN, device=self._device)
        weights = self._weights if self._weights is not None else unseen.expand(len(self._layers))
        self._weights = None
        magnitudes: list[Tensor] = []
        for layer, weight in zip(self._layers.values(), weights, strict=True):
            by_role = {role: seen.get((layer, role), unseen) for role in ROLES}
            by_role["weight"] = weight
            magnitudes += [by_role[role] for role in ROLES]
        row = torch.nan_to_num(torch.stack(magnitudes), nan=math.inf, posinf=math.inf)
        if self._world > 1:
            dist.all_reduce(row, op=dist.ReduceOp.MAX)
        return {f"{_PREFIX} {place}": magnitude for place, magnitude in enumerate(row)}

    def split(self, values: Values) -> Scales | None:
        """Remove the magnitudes from a step's ``values``. Return the scales, or ``None``.

        ``None`` means that the step had no reading of scales. A tensor is left out if no rank has
        seen it, if it is all zero, or if a number in it is not finite.
        """
        running = self._running
        if running is None or f"{_PREFIX} 0" not in values:
            return None
        largest = {role: torchao.largest_number(running.recipe, role) for role in ROLES}
        scales: dict[tuple[str, Role], float] = {}
        for place, key in enumerate(self._keys):
            magnitude = values.pop(f"{_PREFIX} {place}")
            if magnitude is not None and 0.0 < magnitude < math.inf:
                scales[key] = largest[key[1]] / magnitude
        return scales
