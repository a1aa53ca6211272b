"""How much a run processes, and how fast: samples, tokens, FLOPs and the time they took; what is not known is None.

FLOPs are those of a forward and backward pass as the model defines them, counted operator by operator.
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
#: what one rank has processed since the last reading, named as what is made of it; ``None`` where that is not known of
#: a batch in it
Processed = dict[str, Any]
_NOTHING: Processed = {metric_names.SAMPLES_PER_S: 0, metric_names.TOKENS_PER_S: 0, FLOPS: 0.0, SECONDS: 0.0}


class Throughput:
    """Counts what this rank processes, on the host; ``tokens(batch)`` and ``samples(batch)`` are those of a batch.

    FLOPs are counted in the first batch; later ones are assumed to cost as much per token, or per sample without
    tokens.
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
        """Time before the next batch (starting workers, validation) does not count."""
        self._last = None

    def batch_starts(self, trainer: Trainer, batch: Any) -> None:
        """Count what is in ``batch``; in the first one, have FLOPs counted."""
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
        """Without a function of the user's: the defaults, where what they say of the first batch can be right."""
        ids = _token_ids(batch)
        if self._tokens is None and ids is not None and ids.numel() and int(ids.max()) > 1:  # no multi-hot vectors
            self._tokens = default_tokens
        held, drawn = samples_in(batch), cast("Any", getattr(trainer.train_dataloader, "batch_size", None))
        if self._samples is None and held is not None:  # as many as the loader puts into a batch, where that is known
            whole = not isinstance(drawn, int) or held == drawn
            self._samples = samples_in if whole or (held < drawn and trainer.num_training_batches == 1) else None
        if self._samples is None and self._tokens is None:
            rank_zero_info("TrainingHealth: how much a batch holds is not known; samples= or tokens= counts it")

    def stop_counting(self) -> None:
        """No more FLOPs are counted."""
        self._uninstall()
        self._counter, self._uninstall = None, lambda: None

    def batch_ends(self) -> None:
        """Add the batch to what was processed."""
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
    """The size of the token ids in ``batch``; ``None`` where it has none."""
    ids = _token_ids(batch)
    return None if ids is None else ids.numel()


def _token_ids(batch: Any) -> Tensor | None:
    """Its ``input_ids``, or the 2-D integer tensor that it is, or begins with where one as large (labels) comes next.

    Before anything else that may as well be a table of categories.
    """
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
    plugin = trainer.precision_plugin
    if isinstance(plugin, PlanBase):
        dtype = plugin.policy.compute_dtype
    else:
        _, dtype = DTYPES_OF.get(str(trainer.precision), (None, None))
        dtype = None if dtype == "fp64" else dtype  # of which no peak is known
    matmul: Any = torch.backends.cuda.matmul
    tf32 = dtype == "fp32" and has_tf32(trainer.strategy.root_device) and matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else dtype


class CountFlops(compat.TorchDispatchMode):
    """``with CountFlops() as flops: ...; flops.total``: floating-point operations of matrix products and convolutions.

    A multiplication and an addition count as two, attention as its full products (masked halves included), two in
    forward and four in backward, everything else as nothing: the rules of ``torch.utils.flop_counter``, plus attention
    on a CPU. What activation checkpointing or a fused attention recomputes is left out. Of sharded tensors this rank's
    own computation is counted. Kernels that hide their products (cuDNN's recurrent layers, Triton) are not seen.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        #: whether an operator's FLOPs could not be told
        self.uncounted = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not Tensor and hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # a DTensor comes back here with its local parts
        out = func(*args, **(kwargs or {}))
        count = _RULES.get(getattr(func, "overloadpacket", None))
        if count is not None and not _recomputes():
            try:
                self.total += count(*args, **(kwargs or {}), out_val=out)
            except Exception:  # a shape that a rule of torch's does not foresee is no reason to end a run
                self.uncounted = True
        return out

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` trace as if this mode were not active."""
        return True


def _recomputes() -> bool:
    """Whether the operator at hand runs again what forward ran already.

    It does where Python code calls it, with gradients on, in the midst of a backward pass. A second derivative
    (``create_graph=True``) has gradients on too, but is called by the autograd engine.
    """
    if not compat.in_backward() or not torch.is_grad_enabled():
        return False
    frame = compat.calling_frame(__file__)
    return frame is not None and not frame.f_code.co_filename.endswith(compat.ENGINE)


def _without_scores(rule: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    """Of the five products in a fused attention's backward, one recomputes the scores (head sizes are equal)."""
    return rule(*args, **kwargs) * 4 // 5


#: an operator's FLOPs from its arguments
_RULES: dict[Any, Callable[..., int]] = {
    op: partial(_without_scores, rule) if "attention" in str(op) and str(op).endswith("backward") else rule
    for op, rule in (flop_registry | {cpu: flop_registry[op] for cpu, op in compat.cpu_attention().items()}).items()
}
