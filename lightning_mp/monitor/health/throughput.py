"""How much a run processes, and how fast: samples, tokens, FLOPs and the time they took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from lightning_mp.compat.lightning import Trainer, rank_zero_info
from lightning_mp.engines.plan_base import PlanBase
from lightning_mp.monitor.health.flops import CountFlops
from lightning_mp.numerics.device import describe
from lightning_mp.numerics.nested import tensors_in
from lightning_mp.numerics.tf32 import has_tf32
from lightning_mp.policy import hardware
from lightning_mp.policy.words import DTYPES_OF

Tokens = Callable[[Any], "int | Tensor"]


@dataclass(slots=True)
class Processed:
    """What one rank has processed since the last reading; ``tokens`` is ``None`` where batches have none."""

    samples: int = 0
    tokens: Tensor | int | None = None
    flops: float = 0.0
    seconds: float = 0.0


class Throughput:
    """Counts what this rank processes, on the host; ``tokens(batch)`` is the number of tokens of a batch.

    FLOPs are counted in the first batch; later ones are assumed to cost as much per token, or per sample without
    tokens.
    """

    def __init__(self, tokens: Tokens | None, peak_flops: float | None) -> None:
        self._tokens = tokens or default_tokens
        self._given_peak = peak_flops
        self._counter: CountFlops | None = None
        self._counted: tuple[float, Any, int] | None = None
        self._last: float | None = None
        self._done = Processed()
        self._batch: tuple[Any, int] = (None, 0)
        #: the peak FLOP/s of this rank's device, and its source
        self.peak: hardware.Peak | None = None
        self._fp8_peak: hardware.Peak | None = None

    def start(self, trainer: Trainer) -> None:
        """Look the device's peak up."""
        if self._given_peak is not None:
            self.peak = hardware.Peak(float(self._given_peak), "given as peak_flops")
            return
        device, dtype = trainer.strategy.root_device, _compute_dtype(trainer)
        known = describe(device)
        self.peak = None if dtype is None else hardware.peak(known, dtype)
        self._fp8_peak = hardware.peak(known, "fp8")
        if self.peak is None:
            what = f"{dtype or trainer.precision} on {known.name}"
            rank_zero_info(f"TrainingHealth: no peak FLOP/s known for {what}, so no MFU; peak_flops= gives one")

    def epoch_starts(self) -> None:
        """Time before the first batch (starting workers) does not count."""
        self._last = None

    def resumes(self) -> None:
        """Validation is over; its time does not count."""
        self._last = time.perf_counter()

    def batch_starts(self, batch: Any) -> None:
        """Count what is in ``batch``."""
        if self._last is None:
            self._last = time.perf_counter()
        self._batch = self._tokens(batch), samples_in(batch)
        if self._counted is None:
            self._counter = CountFlops()
            self._counter.__enter__()

    def stop_counting(self) -> None:
        """The first batch's forward and backward are done, or failed."""
        counter, self._counter = self._counter, None
        if counter is None:
            return
        counter.__exit__(None, None, None)
        self._counted = float(counter.total), *self._batch
        if self.peak is not None and self._fp8_peak is not None and counter.fp8:
            self.peak = _mixed(self.peak, self._fp8_peak, counter.fp8 / counter.total)
        if counter.uncounted:
            self.peak = None
            rank_zero_info(
                f"TrainingHealth: no MFU, since FLOPs are not known of {', '.join(sorted(counter.uncounted))}"
            )

    def batch_ends(self) -> None:
        """Add the batch to what was processed."""
        self.stop_counting()
        now = time.perf_counter()
        done, (tokens, samples) = self._done, self._batch
        done.seconds += 0.0 if self._last is None else now - self._last
        done.samples += samples
        if tokens is not None:
            done.tokens = tokens if done.tokens is None else done.tokens + tokens
        done.flops += self._flops(tokens, samples)
        self._last = now

    def take(self) -> Processed:
        """What was processed since the last call."""
        done, self._done = self._done, Processed()
        return done

    def _flops(self, tokens: Any, samples: int) -> float:
        if self._counted is None:
            return 0.0
        flops, first_tokens, first_samples = self._counted
        if isinstance(tokens, int) and isinstance(first_tokens, int) and first_tokens:
            return flops * tokens / first_tokens
        return flops * samples / first_samples if first_samples else flops


def _mixed(rest: hardware.Peak, fp8: hardware.Peak, share: float) -> hardware.Peak:
    """The peak of a step of whose FLOPs ``share`` are products in FP8: each kind takes the time that its own allows."""
    seconds = share / fp8.flops_per_s + (1 - share) / rest.flops_per_s
    return hardware.Peak(1 / seconds, f"{rest.source}; {share:.0%} at the peak of fp8")


def default_tokens(batch: Any) -> int | None:
    """The size of ``input_ids``, or of the first integer tensor with two dimensions; ``None`` without either."""
    if isinstance(batch, Tensor):
        return batch.numel() if batch.dim() == 2 and _whole(batch) else None
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        return ids.numel() if isinstance(ids, Tensor) and _whole(ids) else None
    items = cast("list[Any]", batch) if isinstance(batch, (tuple, list)) else []
    return next((count for count in map(default_tokens, items) if count is not None), None)


def samples_in(batch: Any) -> int:
    """The length of the first tensor of the batch; 0 where there is none."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 0)


def _whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool


def _compute_dtype(trainer: Trainer) -> str | None:
    """The dtype of most matrix products of the run."""
    plugin, precision = trainer.precision_plugin, str(trainer.precision)
    if isinstance(plugin, PlanBase):
        dtype = plugin.policy.compute_dtype
    else:
        _, dtype = DTYPES_OF.get(precision, (None, None))
        dtype = None if dtype == "fp64" else dtype  # of which no peak is known
    matmul: Any = torch.backends.cuda.matmul
    tf32 = dtype == "fp32" and has_tf32(trainer.strategy.root_device) and matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else dtype
