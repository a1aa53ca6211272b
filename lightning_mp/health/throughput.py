"""Throughput of a run: samples, tokens and FLOPs, and their time. An unknown number is ``None``.

FLOPs are counted operator by operator in a forward and backward pass.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_mp.compat import torch as compat
from lightning_mp.compat.lightning import Trainer, rank_zero_info
from lightning_mp.numerics.dtypes import describe, has_tf32, tensors_in
from lightning_mp.plan.run import PlanBase
from lightning_mp.plan.side_run import around_passes
from lightning_mp.policy import hardware
from lightning_mp.policy.precision_policy import DTYPES_OF
from lightning_mp.record import metric_names

Count = Callable[[Any], "int | Tensor | None"]
FLOPS, SECONDS = "flops_per_s", "seconds"
#: The work of one rank since the last reading, under the names of the rates. A value is ``None`` if
#: it is unknown for one of the batches.
Processed = dict[str, Any]
_NOTHING: Processed = {metric_names.SAMPLES_PER_S: 0, metric_names.TOKENS_PER_S: 0, FLOPS: 0.0, SECONDS: 0.0}


class Throughput:
    """A count of this rank's work, on the host.

    ``tokens(batch)`` and ``samples(batch)`` count a batch. FLOPs are counted in the first batch. A
    later batch is assumed to cost as much for each token, or for each sample without tokens.
    """

    def __init__(self, trainer: Trainer, tokens: Count | None, samples: Count | None, peak_flops: float | None) -> None:
        self._tokens, self._samples = tokens, samples
        self._counter: CountFlops | None = None
        self._uninstall: Callable[[], object] = lambda: None
        #: the FLOPs of the first batch, its tokens and its samples
        self._counted: tuple[float, Any, Any] | None = None
        self._last: float | None = None
        self._done = dict(_NOTHING)
        self._batch: tuple[Any, Any] = (None, None)
        #: the peak FLOP/s of this rank's device
        self.peak, dtype = peak_flops, _compute_dtype(trainer)
        if peak_flops is None and dtype is not None:
            self.peak = hardware.peak(describe(trainer.strategy.root_device), dtype)

    def pauses(self) -> None:
        """Exclude the time before the next batch, such as validation or the start of workers."""
        self._last = None

    def batch_starts(self, trainer: Trainer, batch: Any) -> None:
        """Count the tokens and samples of ``batch``. In the first batch, begin to count FLOPs."""
        if self._last is None:
            self._last = time.perf_counter()
        if self._counted is None:
            self._choose(trainer, batch)
            self.stop_counting()
            self._counter = counter = CountFlops()
            self._uninstall = around_passes(trainer, lambda: counter)
        tokens, samples = (None if count is None else count(batch) for count in (self._tokens, self._samples))
        self._batch = tokens, samples

    def _choose(self, trainer: Trainer, batch: Any) -> None:
        """Choose the default counts, if the user gave no function and they fit the first batch.

        Token ids must not be all 0 or 1 (multi-hot vectors). The number of samples must not
        contradict the loader's ``batch_size``. A log line says if neither count is known.
        """
        ids = _token_ids(batch)
        if self._tokens is None and ids is not None and ids.numel() and int(ids.max()) > 1:
            self._tokens = default_tokens
        held, drawn = samples_in(batch), cast("Any", getattr(trainer.train_dataloader, "batch_size", None))
        if self._samples is None and held is not None:
            whole = not isinstance(drawn, int) or held == drawn
            self._samples = samples_in if whole or (held < drawn and trainer.num_training_batches == 1) else None
        if self._samples is None and self._tokens is None:
            rank_zero_info("TrainingHealth: how much a batch holds is not known; samples= or tokens= counts it")

    def stop_counting(self) -> None:
        """Stop to count FLOPs."""
        self._uninstall()
        self._counter, self._uninstall = None, lambda: None

    def batch_ends(self) -> None:
        """Add the batch and its time to the work of this rank."""
        counter = self._counter
        self.stop_counting()
        if counter is not None:
            self._counted = float(counter.total), *self._batch
            self.peak = None if counter.uncounted else self.peak
        now = time.perf_counter()
        tokens, samples = self._batch
        seconds = 0.0 if self._last is None else now - self._last
        for name, value in zip(_NOTHING, (samples, tokens, self._flops(tokens, samples), seconds), strict=True):
            before = self._done[name]
            self._done[name] = None if before is None or value is None else before + value
        self._last = now

    def take(self) -> Processed:
        """Return the work since the last call."""
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
    """Return the number of token ids in ``batch``, or ``None`` without token ids."""
    ids = _token_ids(batch)
    return None if ids is None else ids.numel()


def _token_ids(batch: Any) -> Tensor | None:
    """Return the token ids of a batch, or ``None``.

    They are the integer ``input_ids`` of a mapping, or a 2-D integer tensor. Either is the batch or
    its first item. A tensor counts as first item only if it is the only one, or if a tensor of the
    same shape (labels) follows. Otherwise it may be a table of categories.
    """
    after: Any = None
    if isinstance(batch, (tuple, list)) and batch:
        batch, after = cast("list[Any]", [*batch, None])[:2]
    shape = getattr(after, "shape", None)
    if isinstance(batch, Mapping):
        batch = cast("Mapping[str, Any]", batch).get("input_ids")
    elif not isinstance(batch, Tensor) or batch.dim() != 2 or (after is not None and shape != batch.shape):
        return None
    return batch if isinstance(batch, Tensor) and batch.dtype in (torch.int32, torch.int64) else None


def samples_in(batch: Any) -> int | None:
    """Return the common length of all tensors in the batch, or ``None``.

    It is ``None`` if lengths differ, and without tensors. Scalars do not count.
    """
    lengths = {len(tensor) for tensor in tensors_in(batch) if tensor.dim()}
    return lengths.pop() if len(lengths) == 1 else None


def _compute_dtype(trainer: Trainer) -> str | None:
    """Return the dtype of most matrix products of the run, ``"tf32"`` if fp32 products run in it.

    ``None`` for fp64, which has no known peak, and for an unknown precision.
    """
    plugin = trainer.precision_plugin
    if isinstance(plugin, PlanBase):
        dtype = plugin.policy.compute_dtype
    else:
        _, dtype = DTYPES_OF.get(str(trainer.precision), (None, None))
        dtype = None if dtype == "fp64" else dtype
    matmul: Any = torch.backends.cuda.matmul
    tf32 = dtype == "fp32" and has_tf32(trainer.strategy.root_device) and matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else dtype


class CountFlops(compat.TorchDispatchMode):
    """A context that counts the floating-point operations of products and convolutions.

    Use it as ``with CountFlops() as flops: ...`` and read ``flops.total``. The rules are
    ``torch.utils.flop_counter``'s, plus attention on a CPU:

    - A multiplication with an addition counts as two.
    - Attention counts as full products, masked halves included: two in forward, four in backward.
    - Other operators count as nothing.

    Recomputation by activation checkpointing or by a fused attention does not count. For sharded
    tensors this rank's own computation counts. Kernels that hide their products are not seen
    (cuDNN's recurrent layers, Triton).
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        #: True if torch's rule for an operator failed
        self.uncounted = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not Tensor and hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # a DTensor calls this again with its local tensors
        out = func(*args, **(kwargs or {}))
        count = _RULES.get(getattr(func, "overloadpacket", None))
        if count is not None and not _recomputes():
            try:
                self.total += count(*args, **(kwargs or {}), out_val=out)
            except Exception:  # a shape that torch's rule does not expect must not end the run
                self.uncounted = True
        return out

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` trace as if this mode were not active."""
        return True


def _recomputes() -> bool:
    """True if the present operator belongs to the recomputation of a forward pass.

    Python code then calls it within a backward pass, with gradients enabled. An operator of a
    second derivative (``create_graph=True``) has gradients enabled too, but the autograd engine
    calls it.
    """
    if not compat.in_backward() or not torch.is_grad_enabled():
        return False
    frame = compat.calling_frame(__file__)
    return frame is not None and not frame.f_code.co_filename.endswith(compat.ENGINE)


def _without_scores(rule: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    """Return four fifths of the FLOPs of ``rule``, for the backward pass of a fused attention.

    One of its five products recomputes the scores. The share holds if all head sizes are equal.
    """
    return rule(*args, **kwargs) * 4 // 5


#: by operator, a function of its arguments that returns its FLOPs
_RULES: dict[Any, Callable[..., int]] = {
    op: partial(_without_scores, rule) if "attention" in str(op) and str(op).endswith("backward") else rule
    for op, rule in (flop_registry | {cpu: flop_registry[op] for cpu, op in compat.cpu_attention().items()}).items()
}
