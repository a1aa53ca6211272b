"""What one fit does, as one rank sees it: dtypes of what is stored, computed, reduced and kept, and every number."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mp.compat.lightning import Callback, LightningModule, Trainer
from lightning_mp.modules.patterns import plain_name
from lightning_mp.modules.remote import is_remote

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "convolution"}
REDUCTIONS = ("allreduce", "all_reduce", "reduce_scatter", "reduce_")
#: reductions of flags, counts and norms are a few numbers; the smallest gradient here is a norm's, 64 numbers or half
LEAST_GRADIENT = 16
#: dtypes are watched in the first steps only: watching is slow
WATCHED_STEPS = 2
Parts = dict[str, tuple[int, float]]
Names = dict[str, set[str]]


@dataclass
class Run:
    """One fit on one rank. Dtypes are short names; ``computed`` and ``handed_on`` are by module."""

    losses: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    counts: tuple[int, int] = (0, 0)
    #: the norm the plan says it clipped by, a step
    norms: list[float | None] = field(default_factory=list)
    #: parts of the norm of ``.grad`` before and after clipping, a step; empty where gradients lie elsewhere
    before: list[Parts] = field(default_factory=list)
    after: list[Parts] = field(default_factory=list)
    stored: dict[str, str] = field(default_factory=dict)
    computed: Names = field(default_factory=dict)
    handed_on: Names = field(default_factory=dict)
    #: module name → how often its forward began in one watched step: twice where activations are recomputed
    calls: dict[str, float] = field(default_factory=dict)
    #: dtypes of the matrix products of backward
    backward: set[str] = field(default_factory=set)
    #: (operator, dtype) of what was summed across ranks
    reduced: set[tuple[str, str]] = field(default_factory=set)
    state: set[str] = field(default_factory=set)
    #: parameters, gradients, optimizer: bytes on this rank
    bytes: dict[str, int] = field(default_factory=dict)
    #: the local part of everything at the end
    weights: dict[str, Tensor] = field(default_factory=dict)
    #: parameters and buffers in full, where that was asked for
    whole: dict[str, Tensor] = field(default_factory=dict)
    #: of a reference: how far from ``whole`` it is right to end, as the same loop does that rounds a sum another way
    sway: float = 0.0
    moments: list[dict[str, Tensor]] = field(default_factory=list)


class Watch(TorchDispatchMode):
    """Every operator that runs, below autograd and in it, DDP's reducer included; attributed to the module running."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.last: list[str | None] = []
        self.computed: Names = defaultdict(set)
        self.handed_on: Names = defaultdict(set)
        self.calls: Counter[str] = Counter()
        self.backward: set[str] = set()
        self.reduced: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note_reduction(name, args)
        elif name in PRODUCTS:
            self._note_product(args)
        elif name in ("mul", "embedding") and self.last and isinstance(result, Tensor):
            self.last[-1] = dtype_name(result.dtype)
        return result

    def _note_reduction(self, name: str, args: tuple[Any, ...]) -> None:
        if not any(word in name for word in REDUCTIONS):
            return
        tensors = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(t, Tensor)]
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.numel() >= LEAST_GRADIENT:
                self.reduced.add((name.strip("_"), dtype_name(tensor.dtype)))

    def _note_product(self, args: tuple[Any, ...]) -> None:
        dtypes = {dtype_name(a.dtype) for a in args if isinstance(a, Tensor) and a.is_floating_point()}
        if self.inside:
            self.computed[self.inside[-1]] |= dtypes
        else:
            self.backward |= dtypes

    def enter(self, name: str) -> None:
        self.calls[name] += 1
        self.inside.append(name)
        self.last.append(None)

    def leave(self, name: str, finished: bool) -> None:
        """``name``'s forward ended; a recomputation may stop before the end."""
        self.inside.pop()
        last = self.last.pop()
        if finished and last is not None and name not in self.computed:
            self.computed[name].add(last)


def hook(watch: Watch, name: str, module: nn.Module) -> list[Any]:
    def leave(module: nn.Module, args: Any, output: Any) -> None:
        watch.leave(name, finished=output is not None)
        if output is not None:
            items = output if isinstance(output, (tuple, list)) else [output]
            tensors = [one for one in items if isinstance(one, Tensor) and one.is_floating_point()]
            watch.handed_on[name].update(dtype_name(one.dtype) for one in tensors)

    first = module.register_forward_pre_hook(lambda module, args: watch.enter(name))
    # always: a checkpointed region's recomputation leaves by an exception
    return [first, module.register_forward_hook(leave, always_call=True)]


class Observer(Callback):
    """Fills ``run``; saves a checkpoint after step ``save_at`` where one is given."""

    def __init__(self, watch: bool = False, save_at: tuple[Path, int] | None = None, whole: bool = False) -> None:
        self.run = Run()
        self.whole = whole
        self.watch = Watch() if watch else None
        self.save_at = save_at
        self._hooks: list[Any] = []
        self._watching = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.watch is not None:
            modules = [(plain_name(n), m) for n, m in pl_module.named_modules() if n]
            self._hooks = [each for n, m in modules for each in hook(self.watch, n, m)]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.run.before.append({})
        if self.watch is not None and batch_idx < WATCHED_STEPS:
            self.watch.__enter__()
            self._watching = True

    def stop_watching(self) -> None:
        if self.watch is not None and self._watching:
            self.watch.__exit__(None, None, None)
            self._watching = False

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        found = {} if zero_optimizer(trainer) else gradients(pl_module)  # ZeRO has them elsewhere
        self.run.bytes["gradients"] = storage_bytes([*found.values(), *zero_gradients(trainer)])
        self.run.before[-1] = squares(found)  # of the last evaluation, where an optimizer asks for several

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.stop_watching()
        plan: Any = trainer.precision_plugin
        norm = getattr(plan, "last_grad_norm", None)
        self.run.norms.append(None if norm is None else float(norm))
        self.run.after.append(squares(gradients(pl_module)))
        self.run.skipped.append(plan.step_skipped)
        if plan.scaler is not None:
            self.run.scales.append(float(plan.scaler.get_scale()))
        if self.watch is not None and batch_idx == WATCHED_STEPS - 1:
            self._after_watching(trainer, pl_module)
        if self.save_at is not None and trainer.global_step == self.save_at[1]:
            trainer.save_checkpoint(self.save_at[0])

    def _after_watching(self, trainer: Trainer, module: LightningModule) -> None:
        for hook in self._hooks:
            hook.remove()
        watch, run, states = self.watch, self.run, moments(trainer.optimizers[0])
        assert watch is not None
        run.computed, run.backward, run.reduced = dict(watch.computed), watch.backward, watch.reduced
        run.handed_on = dict(watch.handed_on)
        run.calls = {name: count / WATCHED_STEPS for name, count in watch.calls.items()}
        run.stored = stored_dtypes(module)
        run.state = {dtype_name(tensor.dtype) for _, tensor in floating(states)}
        run.bytes["parameters"] = storage_bytes([*parameters(module).values(), *zero_masters(trainer)])
        run.bytes["optimizer"] = storage_bytes(tensor for state in states for tensor in state.values())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        plan: Any = trainer.precision_plugin
        run = self.run
        run.losses, run.lrs = list(pl_module.losses.values()), list(pl_module.lrs.values())
        run.counts = plan.applied_steps, plan.skipped_steps
        run.weights = copies(pl_module)
        if self.whole:
            from support import sharded  # not at the top: it imports one of Lightning's two copies

            run.whole = sharded.whole(pl_module)
        states = moments(trainer.optimizers[0])
        run.moments = [{key: value.clone() for key, value in state.items()} for state in states]


DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def dtype_name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype))


def local(tensor: Tensor) -> Tensor:
    """The part of a parameter, gradient or state tensor that this rank stores."""
    shard = getattr(tensor, "ds_tensor", None)  # ZeRO-3: the parameter itself is empty between uses
    if shard is not None:
        return shard
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """Name → the local part, of what is not on another stage of a pipeline."""
    return {name: local(parameter) for name, parameter in _here(module)}


def _here(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((plain_name(name), one) for name, one in module.named_parameters() if not is_remote(one))


def stored_dtypes(module: nn.Module) -> dict[str, str]:
    return {name: dtype_name(parameter.dtype) for name, parameter in _here(module)}


def copies(module: nn.Module) -> dict[str, Tensor]:
    return {name: local(one).clone() for name, one in _here(module)}


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {plain_name(n): local(p.grad) for n, p in module.named_parameters() if p.grad is not None}


def base_optimizer(optimizer: Any) -> Any:
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def moments(optimizer: Any) -> list[dict[str, Tensor]]:
    """A mapping a stepped parameter, in the optimizer's order: exp_avg, exp_avg_sq, step."""
    inner = base_optimizer(optimizer)
    members = [parameter for group in inner.param_groups for parameter in group["params"]]
    # ZeRO-3 fills the groups for the length of a step only
    states = [inner.state.get(parameter, {}) for parameter in members or list(inner.state)]
    return [dict(part for kv in sorted(state.items()) for part in _stored(*kv)) for state in states]


def _stored(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """A state tensor's local part; of a quantized one, what it is made of."""
    if isinstance(value, Tensor):
        value = local(value)
        inside = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
        yield from ((f"{name}.{part}", bits(getattr(value, part))) for part in inside) if inside else ((name, value),)


def bits(tensor: Tensor) -> Tensor:
    """Numbers of 8 bits as bytes: fp8 travels between processes no other way."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def floating(states: Iterable[dict[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for state in states:
        yield from ((key, value) for key, value in state.items() if key != "step")


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages below ``tensors``, padding included."""
    storages = {s.data_ptr(): s.nbytes() for t in tensors for s in [t.untyped_storage()] if s.nbytes()}
    return sum(storages.values())


def squares(found: dict[str, Tensor]) -> dict[str, tuple[int, float]]:
    """Name → how many numbers lie here and the sum of their squares: a global norm's parts, without a collective."""
    return {name: (tensor.numel(), tensor.double().pow(2).sum().item()) for name, tensor in found.items()}


def zero_optimizer(trainer: Trainer) -> Any:
    return getattr(getattr(trainer.strategy, "deepspeed_engine", None), "optimizer", None)


def zero_masters(trainer: Trainer) -> list[Tensor]:
    """The flat partitions that ZeRO steps, a copy of the parameters' own."""
    zero = zero_optimizer(trainer)
    names = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")  # stages 1 and 2; stage 3
    return [partition for name in names for partition in getattr(zero, name, [])]


def zero_gradients(trainer: Trainer) -> list[Tensor]:
    """The gradient partitions ZeRO holds at the step; none under another strategy."""
    zero = zero_optimizer(trainer)
    groups = getattr(zero, "averaged_gradients", {}).values()  # stages 1 and 2: lists of tensors by group
    flat = getattr(zero, "grad_partitions_flat_buffer", None)  # stage 3
    offloaded = [partition.grad for partition in zero_masters(trainer)]
    held = [*(tensor for group in groups for tensor in group or ()), flat, *offloaded]
    return [tensor for tensor in held if tensor is not None]
