"""The step on one device and under DistributedDataParallel: every rank holds whole parameters and whole gradients."""

# No postponed annotations here: DDP checks those of a communication hook, and refuses strings.

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_mp.compat import torch_sharding as sharding_compat
from lightning_mp.numerics import grads
from lightning_mp.numerics.dtypes import to_torch
from lightning_mp.plan.engine import StepEngine


class EagerEngine(StepEngine):
    """Carries a policy out where gradients are whole."""

    holds = "every process holds all parameters"
    _ddp: DistributedDataParallel | None = None

    def connect(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers, and set in which dtype DDP sums gradients."""
        super().connect(model, optimizers)
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self.reduces = "DDP" if self._ddp is not None else ""
        self._reduce()

    def _reduce(self) -> None:
        """Have DDP, which sums each gradient in its own dtype, sum all in ``reduce_dtype``; float64 stays as it is."""
        dtype = to_torch(self.policy.reduce_dtype)
        members = () if self._ddp is None else self._ddp.parameters()
        summed = {one.dtype for one in members if one.requires_grad and one.is_floating_point()}
        if self._ddp is not None and summed - {dtype, torch.float64}:
            self._ddp.register_comm_hook(dtype, average_in)

    def on_trained_changed(self) -> None:
        """Have DDP sum what is trained from now on, which it decides when it is made."""
        if self._ddp is not None:
            self._average_frozen()
            # DDP notes the parameters when it is made, or unpickled
            self._ddp.__setstate__(self._ddp.__getstate__())
            if not sharding_compat.register_comm_hooks(self._ddp):
                self._reduce()

    def _average_frozen(self) -> None:
        """Average now what a window of accumulation holds of parameters that were frozen within it.

        If one is trained again in the same window, DDP averages what is equal on all ranks once more, and the rest.
        """
        frozen = [parameter for parameter in self._parameters if not parameter.requires_grad]
        used = torch.tensor([parameter.grad is not None for parameter in frozen], device=self.device, dtype=torch.uint8)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)  # with find_unused_parameters=True ranks may differ
        for parameter, by_any in zip(frozen, used.tolist(), strict=True):
            if by_any:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                _average_(parameter.grad, to_torch(self.policy.reduce_dtype)).wait()

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Clip by the global 2-norm, in fp32."""
        self.last_norm = grads.clip_grad_norm_(grads.parameters_of(optimizer), max_norm)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """As the base does; what rounds stochastically (torchao's) rounds alike on every rank, or weights differ."""
        if not (self.distributed and getattr(optimizer, "bf16_stochastic_round", False)):
            return super().step(optimizer, **kwargs)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.scaler.attempts)
            return super().step(optimizer, **kwargs)


def average_in(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The communication hook: average a bucket in ``dtype`` and hand it back in its own."""
    return _average_(bucket.buffer(), dtype)


def _average_(gradient: Tensor, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    # A complex or float64 gradient keeps its dtype; ``to`` makes no copy where none is needed.
    wire = gradient if gradient.is_complex() or gradient.dtype == torch.float64 else gradient.to(dtype)
    work: Any = dist.all_reduce(wire.div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: gradient.copy_(done.value()[0]))
