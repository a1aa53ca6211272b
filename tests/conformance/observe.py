"""What one fit does, as one rank sees it: dtypes of what is stored, computed, reduced and kept, and every number."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from conformance import local
from lightning_mp.compat.lightning import Callback, LightningModule, Trainer
from lightning_mp.modules.patterns import plain_name

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
            self.last[-1] = local.dtype_name(result.dtype)
        return result

    def _note_reduction(self, name: str, args: tuple[Any, ...]) -> None:
        if not any(word in name for word in REDUCTIONS):
            return
        tensors = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(t, Tensor)]
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.numel() >= LEAST_GRADIENT:
                self.reduced.add((name.strip("_"), local.dtype_name(tensor.dtype)))

    def _note_product(self, args: tuple[Any, ...]) -> None:
        dtypes = {local.dtype_name(a.dtype) for a in args if isinstance(a, Tensor) and a.is_floating_point()}
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
            watch.handed_on[name].update(_floating(output))

    first = module.register_forward_pre_hook(lambda module, args: watch.enter(name))
    # always: a checkpointed region's recomputation leaves by an exception
    return [first, module.register_forward_hook(leave, always_call=True)]


def _floating(value: Any) -> set[str]:
    items = value if isinstance(value, (tuple, list)) else [value]
    return {local.dtype_name(i.dtype) for i in items if isinstance(i, Tensor) and i.is_floating_point()}


class Observer(Callback):
    """Fills ``run``; saves a checkpoint after step ``save_at`` where one is given."""

    def __init__(self, watch: bool = False, save_at: tuple[Path, int] | None = None, whole: bool = False) -> None:
        self.run = Run()
        self.whole = whole
        self.watch = Watch() if watch else None
        self.save_at = save_at
        self._hooks: list[Any] = []
        self._watching = False

    # ------------------------------------------------------------------ dtypes

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

    # ------------------------------------------------------------------ steps

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        found = {} if local.zero_optimizer(trainer) else local.gradients(pl_module)  # ZeRO has them elsewhere
        self.run.bytes["gradients"] = local.storage_bytes([*found.values(), *local.zero_gradients(trainer)])
        self.run.before[-1] = local.squares(found)  # of the last evaluation, where an optimizer asks for several

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.stop_watching()
        plan: Any = trainer.precision_plugin
        norm = getattr(plan, "last_grad_norm", None)
        self.run.norms.append(None if norm is None else float(norm))
        self.run.after.append(local.squares(local.gradients(pl_module)))
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
        watch, run, states = self.watch, self.run, local.moments(trainer.optimizers[0])
        assert watch is not None
        run.computed, run.backward, run.reduced = dict(watch.computed), watch.backward, watch.reduced
        run.handed_on = dict(watch.handed_on)
        run.calls = {name: count / WATCHED_STEPS for name, count in watch.calls.items()}
        run.stored = local.stored(module)
        run.state = {local.dtype_name(tensor.dtype) for _, tensor in local.floating(states)}
        run.bytes["parameters"] = local.storage_bytes(
            [*local.parameters(module).values(), *local.zero_masters(trainer)]
        )
        run.bytes["optimizer"] = local.storage_bytes(tensor for state in states for tensor in state.values())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        plan: Any = trainer.precision_plugin
        run = self.run
        run.losses, run.lrs = list(pl_module.losses.values()), list(pl_module.lrs.values())
        run.counts = plan.applied_steps, plan.skipped_steps
        run.weights = local.trained(pl_module)
        if self.whole:
            from support import sharded  # not at the top: it imports one of Lightning's two copies

            run.whole = sharded.whole(pl_module)
        states = local.moments(trainer.optimizers[0])
        run.moments = [{key: value.clone() for key, value in state.items()} for state in states]
