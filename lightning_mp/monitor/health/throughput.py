"""How much a run processes, and how fast: samples, tokens, FLOPs and the time they took; what is not known is None."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from lightning_mp.compat.lightning import Trainer, rank_zero_info
from lightning_mp.engines.plan_base import PlanBase
from lightning_mp.monitor import metric_names
from lightning_mp.monitor.health.flops import CountFlops
from lightning_mp.monitor.side_run import around_passes
from lightning_mp.numerics.device import describe, has_tf32
from lightning_mp.numerics.dtypes import tensors_in
from lightning_mp.policy import hardware
from lightning_mp.policy.words import DTYPES_OF

Count = Callable[[Any], "int | Tensor | None"]


FLOPS, SECONDS = "flops_per_s", "seconds"
#: what one rank has processed since the last reading, named as what is made of it; ``None`` where that is not known of
#: a batch in it
Processed = dict[str, Any]
_NOTHING: Processed = {metric_names.SAMPLES_PER_S: 0, metric_names.TOKENS_PER_S: 0, FLOPS: 0.0, SECONDS: 0.0}


class Throughput:
    """Counts what this rank processes, on the host; ``tokens(batch)`` and ``samples(batch)`` are those of a batch.

    FLOPs are counted in the first batch; later ones are assumed to cost as much per token, or per sample without
    tokens.
    """

    def __init__(self, tokens: Count | None, samples: Count | None, peak_flops: float | None) -> None:
        self._tokens, self._samples = tokens, samples
        self._given_peak = peak_flops
        self._counter: CountFlops | None = None
        self._uninstall: Callable[[], None] | None = None
        #: the FLOPs of the first batch, its tokens and its samples
        self._counted: tuple[float, Any, Any] | None = None
        self._last: float | None = None
        self._done = dict(_NOTHING)
        self._batch: tuple[Any, Any] = (None, None)
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

    def pauses(self) -> None:
        """Time before the next batch (starting workers, validation) does not count."""
        self._last = None

    def batch_starts(self, trainer: Trainer, batch: Any) -> None:
        """Count what is in ``batch``; in the first one, have FLOPs counted."""
        if self._last is None:
            self._last = time.perf_counter()
        if self._counted is None:
            self._choose(trainer, batch)
            self._counter = CountFlops()
            self._uninstall = self._uninstall or around_passes(trainer, lambda: self._counter or nullcontext())
        tokens, samples = (None if count is None else count(batch) for count in (self._tokens, self._samples))
        self._batch = tokens, samples

    def _choose(self, trainer: Trainer, batch: Any) -> None:
        """Without a function of the user's: the defaults, where what they say of the first batch can be right."""
        ids = _token_ids(batch)
        if self._tokens is None and ids is not None and ids.numel() and int(ids.max()) > 1:  # no multi-hot vectors
            self._tokens = default_tokens
        held, drawn = samples_in(batch), getattr(trainer.train_dataloader, "batch_size", None)
        if self._samples is None and held is not None:  # as many as the loader puts into a batch, where that is known
            whole = not isinstance(drawn, int) or held == drawn
            self._samples = samples_in if whole or (held < drawn and trainer.num_training_batches == 1) else None
        if self._samples is None and self._tokens is None:
            rank_zero_info("TrainingHealth: how much a batch holds is not known; samples= or tokens= counts it")

    def stop_counting(self) -> None:
        """No more FLOPs are counted."""
        self._counter, uninstall, self._uninstall = None, self._uninstall, None
        if uninstall is not None:
            uninstall()

    def batch_ends(self) -> None:
        """Add the batch to what was processed."""
        counter = self._counter
        self.stop_counting()
        if counter is not None:
            self._conclude(counter)
        now = time.perf_counter()
        tokens, samples = self._batch
        seconds = 0.0 if self._last is None else now - self._last
        for name, value in zip(_NOTHING, (samples, tokens, self._flops(tokens, samples), seconds), strict=True):
            before = self._done[name]
            self._done[name] = None if before is None or value is None else before + value
        self._last = now

    def _conclude(self, counter: CountFlops) -> None:
        self._counted = float(counter.total), *self._batch
        if self.peak is not None and self._fp8_peak is not None and counter.fp8:
            share = counter.fp8 / counter.total  # each kind takes the time that its own peak allows
            seconds = share / self._fp8_peak.flops_per_s + (1 - share) / self.peak.flops_per_s
            self.peak = hardware.Peak(1 / seconds, f"{self.peak.source}; {share:.0%} at the peak of fp8")
        if counter.uncounted:
            self.peak = None
            names = ", ".join(sorted(counter.uncounted))
            rank_zero_info(f"TrainingHealth: no MFU, since FLOPs are not known of {names}")

    def take(self) -> Processed:
        """What was processed since the last call."""
        done, self._done = self._done, dict(_NOTHING)
        return done

    def _flops(self, tokens: Any, samples: Any) -> float | None:
        if self._counted is None:
            return None
        flops, first_tokens, first_samples = self._counted
        for now, first in ((tokens, first_tokens), (samples, first_samples)):
            if isinstance(now, int) and isinstance(first, int) and first:
                return flops * now / first
        return None


def default_tokens(batch: Any) -> int | None:
    """The size of the token ids in ``batch``; ``None`` where it has none.

    They are its ``input_ids``, or the 2-D integer tensor that it is, or that it begins with where one as large comes
    next (labels, a mask): before anything else it may as well be a table of categories.
    """
    ids = _token_ids(batch)
    return None if ids is None else ids.numel()


def _token_ids(batch: Any) -> Tensor | None:
    after: Any = None
    if isinstance(batch, (tuple, list)) and batch:  # what comes later may be classes, several of a sample
        batch, after = cast("list[Any]", [*batch, None])[:2]
    shape = getattr(after, "shape", None)
    if isinstance(batch, Mapping):
        batch = cast("Mapping[str, Any]", batch).get("input_ids")
    elif not isinstance(batch, Tensor) or batch.dim() != 2 or (after is not None and shape != batch.shape):
        return None
    return batch if isinstance(batch, Tensor) and batch.dtype in (torch.int32, torch.int64) else None


def samples_in(batch: Any) -> int | None:
    """The length on which all tensors of the batch agree; ``None`` where they do not, or there are none."""
    lengths = {len(tensor) for tensor in tensors_in(batch) if tensor.dim()}
    return lengths.pop() if len(lengths) == 1 else None


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
