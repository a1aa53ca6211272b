"""Whole fits on a CUDA machine of nothing: where the host waits in a warm step, and what changes device."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import lightning_mp.callbacks
from cuda_path import machine
from lightning_mp import FP8, MixedPrecisionPlan, PlanError, make_strategy
from lightning_mp.compat.torch_fake import fake_ranks, moved_in_place, storage_key, wraps
from lightning_mp.planner.storages import FakeCopies, fake_module

ATEN = torch.ops.aten
READS = (ATEN._local_scalar_dense.default, ATEN.equal.default, ATEN.nonzero.default)
COPIES = (ATEN._to_copy.default, ATEN.copy_.default)
#: what is answered: no number is known, and two tensors of unknown ones are equal; pinned memory has no fake
ANSWERS: dict[Any, Callable[[Tensor], Any]] = {
    ATEN._local_scalar_dense.default: lambda tensor: tensor.dtype is not torch.bool and 0.0,
    ATEN.equal.default: lambda tensor: True,
    ATEN._pin_memory.default: lambda tensor: tensor.clone(),
}
HOST = torch.device("cpu")
#: modules whose functions ask for something
ASKS = ("lightning_mp.", "lightning.", "torch.distributed.", "torch.optim.", "torch.nn.utils.", "torch.amp.")
#: the step that is watched: what is done once has been done, and what waits for a later step has begun to
WARM = 4
QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def site() -> str:
    """Who asked, past torch's way from Python to an operator."""
    frame = sys._getframe(1)
    while frame is not None:
        name, here = frame.f_globals.get("__name__", ""), frame.f_code
        if name.startswith(ASKS) and here.co_name not in ("__torch_function__", "__torch_dispatch__"):
            return f"{name.replace('.', '/')}.py:{here.co_name}"
        frame = frame.f_back
    return "torch"


class Watched(TorchDispatchMode):
    """Counts where the host waits for the device while ``on``, and finds what it reads before it has arrived.

    Tensors on the CPU that are no fakes are computed for real: meshes and counts of steps need their numbers.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.on, self._real = False, True
        self.waits: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()
        #: reads of what had not arrived
        self.early: list[str] = []
        #: copies to the host that nothing waited for: storage, and the event that was recorded after it
        self._coming: dict[int, list[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(wraps, types)):
            return NotImplemented  # it comes back with what the wrapper holds
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = kwargs.get("device")
        fake = any(isinstance(one, FakeTensor) for one in tensors) or (device is not None and device.type == "cuda")
        if not fake and self._real:
            with _disable_current_modes():
                return func(*args, **kwargs)
        self._see(func, tensors)
        if func in COPIES:
            return self._copy(func, args, kwargs)
        return ANSWERS[func](args[0]) if func in ANSWERS else func(*args, **kwargs)

    def _see(self, func: Any, tensors: list[Tensor]) -> None:
        there = any(one.device.type == "cuda" for one in tensors)
        self._look(func, tensors)
        if self.on:
            self.operators[str(func)] += 1
        if func in READS and there:
            self.note("read")
            self._coming.clear()

    @contextmanager
    def off(self) -> Generator[None, None, None]:
        """Within, tensors on the CPU are made as fakes too."""
        self._real = False
        yield
        self._real = True

    def note(self, what: str) -> None:
        if self.on:
            self.waits[f"{what} {site()}"] += 1

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        source = args[1] if func is ATEN.copy_.default else args[0]
        target = args[0].device if func is ATEN.copy_.default else kwargs.get("device") or source.device
        if source.device.type == target.type:
            return func(*args, **kwargs)
        blocks = not (kwargs.get("non_blocking") or (func is ATEN.copy_.default and len(args) > 2 and args[2]))
        to_host = target.type == "cpu"
        if blocks:
            self.note("copy to host" if to_host else "copy to device")
            self._coming.clear()
        if func is ATEN.copy_.default and not isinstance(args[0], FakeTensor):
            with _disable_current_modes():
                out = args[0].zero_()  # of what is not finite there is none
        else:
            out = func(*args, **kwargs)
        if to_host and not blocks:
            self._coming[storage_key(out)] = [out.untyped_storage(), None]
        return out

    def _look(self, func: Any, tensors: list[Tensor]) -> None:
        named = isinstance(func, torch._ops.OpOverload)  # and is no operator of a higher order
        looks = named and (func.is_view or func.namespace == "prim")
        for tensor in tensors if self._coming and not looks else ():
            if tensor.device.type == "cpu" and storage_key(tensor) in self._coming:
                self.early.append(f"{func} {site()}")

    def told(self, what: str, who: Any) -> None:
        if what == "event.record":
            for coming in self._coming.values():
                coming[1] = coming[1] or who
        elif what in machine.WAITS:
            self.note(what)
            arrived = [key for key, (_, event) in self._coming.items() if what != "event.synchronize" or event is who]
            for key in arrived:
                del self._coming[key]

    def listed(self, tensor: Tensor) -> Any:
        """``tensor.tolist()``, of numbers that are not known."""
        self._look("tolist", [tensor])
        if tensor.device.type == "cuda":
            self.note("read")
            self._coming.clear()
        with _disable_current_modes():
            return torch.zeros(tensor.shape, dtype=tensor.dtype).tolist()


class Block(nn.Module):
    """Pre-norm, residual; its sizes are multiples of FP8's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.linear(self.norm(x)))


OPTIMIZERS: dict[str, Any] = {
    "fused AdamW": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "SGD": partial(torch.optim.SGD, lr=1e-2),
}


class Net(LightningModule):
    """Blocks between two layers, which reads nothing itself."""

    def __init__(self, optimizer: str = "fused AdamW", *, scheduler: bool = False, fails: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 32), nn.Linear(32, 16)
        self.blocks = nn.Sequential(Block(32), Block(32))
        self._optimizer, self._scheduler, self._fails = optimizer, scheduler, fails

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self._fails and batch_idx == 2:
            raise KeyError("planned")
        return self.head(self.blocks(self.first(batch[0]))).float().pow(2).mean()

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self._optimizer](self.parameters())
        if not self._scheduler:
            return optimizer
        rule = torch.optim.lr_scheduler.LinearLR(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rule, "interval": "step"}}


@dataclass(frozen=True)
class Fit:
    """A run of a few steps; its arguments as a user writes them."""

    precision: str = "bf16-mixed"
    strategy: str = "auto"
    ranks: int = 1
    clip: str | None = None
    #: arguments of the plan, of the strategy, and of the Trainer
    plan: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callback: str | None = None
    optimizer: str = "fused AdamW"
    scheduler: bool = False
    steps: int = WARM + 2
    #: in its third batch
    fails: bool = False
    #: Lightning's own precision plugin in place of a plan
    stock: bool = False

    def arguments(self) -> dict[str, Any]:
        given: dict[str, Any] = {"devices": self.ranks, "accelerator": "cuda", **self.trainer}
        if self.clip is not None:
            given |= {"gradient_clip_val": 1.0, "gradient_clip_algorithm": self.clip}
        if self.stock:
            return {**given, "precision": self.precision}
        fp8 = FP8(small="convert") if self.precision == "fp8-mixed" else None
        plan = MixedPrecisionPlan(self.precision, **{"fp8": fp8, **self.plan})
        if self.strategy != "auto":
            given["strategy"] = make_strategy(self.strategy, plan, **self.options)
        return {**given, "plugins": [plan]}

    def run(self) -> Found:
        module = Net(self.optimizer, scheduler=self.scheduler, fails=self.fails)
        with (
            tempfile.TemporaryDirectory() as folder,
            on_the_machine(module, self.ranks) as (watched, module),
            mock.patch.dict(os.environ, LOCAL_RANK="0"),  # Lightning starts no other process
        ):
            window, given = _Window(watched), self.arguments()
            plugins = [*given.pop("plugins", []), *([LightningEnvironment()] if self.ranks > 1 else [])]
            callbacks = [window, *([CALLBACKS[self.callback](folder)] if self.callback else [])]
            options = {"max_steps": self.steps, "default_root_dir": folder, "callbacks": callbacks, "plugins": plugins}
            rows = DataLoader(TensorDataset(torch.ones(4096, 16)), batch_size=16)
            Trainer(**options, **QUIET, **given).fit(module, rows)
        return Found(dict(watched.waits), watched.early, window.moved, dict(watched.operators))


CALLBACKS: dict[str, Callable[[str], Callback]] = {
    "TrainingHealth": lambda folder: lightning_mp.callbacks.TrainingHealth(folder, report=False),
    "LossScaleMonitor": lambda folder: lightning_mp.callbacks.LossScaleMonitor(),
    "PrecisionAudit": lambda folder: lightning_mp.callbacks.PrecisionAudit(run_dir=folder),
    "NonFiniteGuard": lambda folder: lightning_mp.callbacks.NonFiniteGuard(),
    "EnableTF32": lambda folder: lightning_mp.callbacks.EnableTF32("high"),
    "DtypePinning": lambda folder: lightning_mp.callbacks.DtypePinning({"LayerNorm": "fp32"}),
    "ActivationCheckpointing": lambda folder: lightning_mp.callbacks.ActivationCheckpointing("Block"),
}


@dataclass(frozen=True)
class Fits:
    """Several, one after another in one process: what was seen of each, or the plan's refusal."""

    fits: tuple[Fit, ...]

    def run(self) -> list[Found | str]:
        return [self._found(fit) for fit in self.fits]

    @staticmethod
    def _found(fit: Fit) -> Found | str:
        try:
            return fit.run()
        except PlanError as error:
            return str(error)
        except Exception as error:
            raise RuntimeError(f"{fit}") from error


@dataclass(frozen=True)
class Found:
    """What was seen of a fit: how often the host waited in a warm step, and where."""

    waits: dict[str, int]
    #: what was read before it had arrived
    early: list[str]
    #: what was on another device at the end than in the warm step
    moved: list[str]
    operators: dict[str, int]


class _Window(Callback):
    """Watches one step: from where its first batch begins to where that of the next does."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._devices: dict[str, str] = {}
        self.moved: list[str] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        begins = batch_idx % trainer.accumulate_grad_batches == 0
        if begins and trainer.global_step == WARM:
            self._devices = _devices(trainer)
        if begins:
            self._watched.on = trainer.global_step == WARM

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        after = _devices(trainer)
        self.moved = [
            f"{name} {device} {after.get(name)}" for name, device in self._devices.items() if after.get(name) != device
        ]


def _devices(trainer: Trainer) -> dict[str, str]:
    module = trainer.lightning_module
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for index, optimizer in enumerate(trainer.optimizers):
        for number, state in enumerate(optimizer.state.values()):
            named |= {f"{index}.{number}.{key}": one for key, one in state.items() if isinstance(one, Tensor)}
    return {name: str(one.device) for name, one in named.items()}


@contextmanager
def watching() -> Generator[Watched, None, None]:
    """Within, tensors on "cuda" are fakes, and operators are seen."""
    watched = Watched()

    def tolist(self: Tensor) -> Any:
        return watched.listed(self)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", tolist))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        machine.LISTENERS.append(watched.told)
        stack.callback(machine.LISTENERS.clear)
        stack.enter_context(watched)
        yield watched


@contextmanager
def on_the_machine(module: LightningModule, ranks: int) -> Generator[tuple[Watched, Any], None, None]:
    """Within, this process is the first of ``ranks``, and trains a copy of ``module`` whose tensors are fakes."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(moved_in_place())
        stack.enter_context(mock.patch.object(dist, "broadcast_object_list"))
        watched = stack.enter_context(watching())
        with watched.off(), FakeCopies(HOST):
            copied = fake_module(module, HOST)
        stack.enter_context(fake_ranks(ranks, lambda one: None if isinstance(one, FakeTensor) else one))
        yield watched, copied
