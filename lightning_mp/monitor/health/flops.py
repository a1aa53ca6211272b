"""FLOPs of a forward and backward pass, counted operator by operator, as the model defines them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lightning_mp.compat import torch as compat
from lightning_mp.compat.torchao import held_dtype


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
        #: those of it that are products in FP8
        self.fp8 = 0
        #: an operator's FLOPs from its arguments
        self.rules = _RULES
        #: operators whose FLOPs could not be told
        self.uncounted: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not Tensor and hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # a DTensor comes back here with its local parts
        out = func(*args, **(kwargs or {}))
        count = self.rules.get(getattr(func, "overloadpacket", None))
        if count is not None and not _recomputes():
            try:
                flops = count(*args, **(kwargs or {}), out_val=out)
                self.total += flops
                self.fp8 += flops if args and held_dtype(args[0]).itemsize == 1 else 0
            except Exception:  # a shape that a rule of torch's does not foresee is no reason to end a run
                self.uncounted.add(str(func))
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
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_filename.endswith((__file__, *compat.AROUND_MODES)):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.endswith(compat.ENGINE)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_args: Any, **_kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_args: Any, **_kwargs: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


def _without_scores(rule: Callable[..., int]) -> Callable[..., int]:
    """Of the five products in a fused attention's backward, one recomputes the scores (head sizes are equal)."""

    def count(*args: Any, **kwargs: Any) -> int:
        return rule(*args, **kwargs) * 4 // 5

    return count


def _rules() -> dict[Any, Callable[..., int]]:
    forward, backward = compat.cpu_attention()
    rules: dict[Any, Callable[..., int]] = {
        **cast("dict[Any, Callable[..., int]]", flop_registry),
        forward: _attention,
        backward: _attention_backward,
    }
    fused = {op for op in rules if "attention" in str(op) and str(op).endswith("backward")}
    return {op: _without_scores(rule) if op in fused else rule for op, rule in rules.items()}


_RULES = _rules()
