"""``predict_memory``: the peak memory of one rank, by a trace if possible, else by a formula."""

import logging
import os
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from lightning_mp.compat import check_versions, quietly
from lightning_mp.compat.lightning import (
    Callback,
    DummyLogger,
    LightningEnvironment,
    LightningModule,
    Strategy,
    Trainer,
    rank_zero_only,
    rank_zero_warn,
)
from lightning_mp.compat.torch_fake import FakeTensorMode, fake_ranks, leaves, mapped, moved_in_place, resizes_told
from lightning_mp.compat.transformers import block_classes, fakes_unnoticed
from lightning_mp.errors import Faults, PlanError, one_line
from lightning_mp.numerics.dtypes import to_torch
from lightning_mp.numerics.rng import process_kept
from lightning_mp.plan.plan import MixedPrecisionPlan
from lightning_mp.plan.side_run import BARE
from lightning_mp.planner import ModelShape, estimate
from lightning_mp.planner.memory import PARTS, MemoryPrediction, held, name_of
from lightning_mp.planner.storages import FakeCopies, Storages, alive, fake_batch, fake_module, known, peak
from lightning_mp.policy import Checkpointing, PrecisionPolicy
from lightning_mp.strategies.factory import make_strategy, trainer_kwargs

#: strategies under which every rank holds the whole model
_REPLICATED = ("auto", "ddp")
_HELD: tuple[str, ...] = ("parameters", "gradients", "optimizer_state")


def predict_memory(
    module: nn.Module,
    batch: Any,
    plan: MixedPrecisionPlan,
    *,
    strategy: str | Strategy = "auto",
    devices: int = 1,
    trainer_args: Mapping[str, Any] | None = None,
) -> MemoryPrediction:
    """Predict the peak memory of the first rank in its first two optimizer steps, without allocating it.

    The Trainer, the plan and the strategy run two steps on a copy of ``module`` whose tensors have no memory. Every
    storage is counted while it is alive. Weights may be on the meta device. Integers of the batch keep their values. A
    value computed from activations is unknown: if the module reads it, a float is 1 and a bool is False.

    If the trace fails, one warning gives the reason, and the prediction comes from a formula.

    Args:
        module: a LightningModule. It, the random generators and the process stay as they are.
        batch: the batch that ``training_step``, or ``pipeline_batch``, gets on one rank.
        plan: the plan of the run.
        strategy: a name for ``make_strategy``, or its result, which cannot be used for a run afterwards.
        devices: the number of ranks.
        trainer_args: Trainer arguments that change memory, such as ``accumulate_grad_batches``.

    Raises:
        PlanError: a bad argument, or a run that the Trainer would refuse.
    """
    _check(module, plan, devices)
    common, built, ranks = dict(trainer_args or {}), cast("Any", strategy), int(devices)
    try:
        name = name_of(strategy)
        if isinstance(strategy, str) and name not in _REPLICATED:
            built = make_strategy(strategy, plan)
        if name in _REPLICATED:
            return _replicated(traced(module, batch, plan, {**common, "devices": 1}), module, plan.policy, ranks)
        if name.startswith("deepspeed"):
            return by_formula(module, batch, plan, built, ranks, "DeepSpeed copies and partitions weights itself")
        if name == "pipeline":
            return by_formula(module, batch, plan, built, ranks, "a pipeline's ranks run different stages")
        return traced(module, batch, plan, {**common, "strategy": built, "devices": ranks})
    except PlanError:
        raise
    except Exception as error:  # from torch, Lightning or the user's code
        rank_zero_warn(f"predict_memory answers by a formula: {why(error)}")
        return by_formula(module, batch, plan, built, ranks, why(error))


def _check(module: object, plan: object, devices: object) -> None:
    with Faults("predict_memory") as faults:
        if not isinstance(module, LightningModule):
            faults.add(f"a {type(module).__name__} is no LightningModule", fix="wrap the network in one")
        if not isinstance(plan, MixedPrecisionPlan):
            faults.add(f"plan={plan!r} is no MixedPrecisionPlan", fix="write MixedPrecisionPlan('bf16-mixed')")
        faults.whole("devices", devices, 1, "write the number of ranks")
        check_versions(faults, "torch", "torch:fake", "lightning")


def why(error: BaseException) -> str:
    """Return the function that raised in a trace, its error, and its file and line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    said = f"{last.name} raised {type(error).__name__}: {one_line(error)[:160]}"
    return f"{said} ({Path(last.filename).name}:{last.lineno})"


def _replicated(found: MemoryPrediction, module: nn.Module, policy: PrecisionPolicy, ranks: int) -> MemoryPrediction:
    """Add DDP's buckets to the prediction for one device.

    The buckets have the size of the gradients. A gradient of another dtype than the sum has its sum beside it until
    the next backward pass.
    """
    if ranks == 1:
        return found
    kept, size = found.held["gradients"], to_torch(policy.reduce_dtype).itemsize
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    # Gradients have 2 or 4 bytes a number, and ``size`` is one of these: count the gradients of the other.
    summed = max((kept - size * trained) // (6 - 2 * size), 0)
    buckets = kept + size * summed
    parts = {**found.parts, "other": found.parts["other"] + buckets}
    return replace(found, peak_bytes=found.peak_bytes + buckets, parts=parts)


def by_formula(
    module: nn.Module, batch: Any, plan: MixedPrecisionPlan, strategy: str | Strategy, ranks: int, reason: str
) -> MemoryPrediction:
    """Return the prediction of :func:`lightning_mp.planner.estimate`.

    Without a transformers config it has parameters, gradients, optimizer state and buffers alone.
    """
    policy, notes = plan.policy, [f"not traced: {reason}"]
    params = sum(parameter.numel() for parameter in module.parameters())
    config = next((inner.config for inner in module.modules() if hasattr(inner, "config")), None)
    name, (shards, split) = name_of(strategy), (ranks, 1)
    if hasattr(strategy, "degrees"):  # (ranks, ranks that shard the weights, ranks that split layers or share them out)
        _, shards, split = cast("Any", strategy).degrees(ranks)
    kind = "fsdp2" if name == "pipeline" and shards > 1 else name
    sizes = held(policy.precision, kind, shards)
    found: dict[str, float] = {part: params / split * size for part, size in zip(_HELD, sizes, strict=True)}
    shape: tuple[int, ...] = next((leaf.shape for leaf in leaves(batch) if isinstance(leaf, Tensor)), (1,))
    try:
        estimated = estimate(
            ModelShape.from_config(config, params=params, seq_len=shape[1] if len(shape) > 1 else None),
            gpu="h100-80",
            gpus=ranks,
            strategy=kind,
            tensor=1 if name == "pipeline" else split,
            pipeline=split if name == "pipeline" else 1,
            precision=policy.precision,
            micro_batch=shape[0],
            checkpointing="none" if policy.checkpointing is None else policy.checkpointing.mode,
        ).parts
        # This function knows the strategy's mesh (HSDP), ``estimate`` knows ZeRO's copy of an embedding.
        found = {**found, **estimated} if name.startswith("deepspeed") else {**estimated, **found}
        notes.append("by the formula of a decoder with AdamW")
    except (PlanError, TypeError) as error:
        cause = "no transformers config"
        if config is not None and isinstance(error, PlanError):
            cause = error.faults[0].problem
        notes.append(f"{cause}: activations are not counted, and the optimizer is taken for AdamW")
    found["buffers"] = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
    parts = {part: round(found.get(part, 0)) for part in PARTS}
    stays = {part: parts[part] for part in (*_HELD, "buffers")}
    return MemoryPrediction(sum(parts.values()), parts, stays, "formula", tuple(notes))


# ---------------------------------------------------------------------- the largest batch on a device

#: the largest number of rows that is tried
MOST_ROWS = 4096
_TRIES = 8
Mode = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class Fit:
    """A way of checkpointing: the prediction for the given batch, and the largest number of rows that fits, or 0."""

    checkpointing: Mode
    prediction: MemoryPrediction
    rows: int


def rows_of(batch: Any) -> int:
    """Return the number of rows of ``batch``: the size of its first tensor, or 1."""
    return next((len(leaf) for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)


def fits(
    module: nn.Module,
    batch: Any,
    plan: MixedPrecisionPlan,
    memory: float,
    strategy: Callable[[MixedPrecisionPlan], Any] = lambda _: "auto",
    known: MemoryPrediction | None = None,
    **run: Any,
) -> Iterator[Fit]:
    """Yield each way of checkpointing on a device of ``memory`` bytes, the one that recomputes least first.

    Checkpointed are the plan's modules, or else the blocks that a transformers model names. ``strategy`` makes the
    strategy for a plan. ``known`` is an earlier prediction for ``plan`` and ``batch``. ``run`` has further arguments
    of ``predict_memory``.
    """
    own, given = plan.policy.checkpointing, rows_of(batch)
    named = {name for inner in module.modules() for name in block_classes(inner)}
    blocks = sorted(named & {type(inner).__name__ for inner in module.modules()})
    patterns = tuple(blocks) if own is None else own.modules
    modes: tuple[Mode, ...] = ("none", "selective", "full") if patterns else ("none",)
    for mode in modes:
        recomputed = None if mode == "none" else Checkpointing(modules=patterns, mode=mode)
        there = MixedPrecisionPlan.from_policy(replace(plan.policy, checkpointing=recomputed))

        def predict(rows: int, there: MixedPrecisionPlan = there) -> MemoryPrediction:
            """Return the prediction for that number of rows, which repeat the rows of the batch."""
            chosen = torch.arange(rows) % given

            def of(leaf: Any) -> Any:
                return leaf[chosen] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == given else leaf

            return predict_memory(module, mapped(of, batch), there, strategy=strategy(there), **run)

        prediction = known if known is not None and recomputed == own else predict(given)
        yield Fit(mode, prediction, most_rows(lambda rows: predict(rows).peak_bytes, memory, given, prediction))


def most_rows(peak: Callable[[int], int], memory: float, rows: int, known: MemoryPrediction) -> int:
    """Return the largest number of rows whose ``peak`` is at most ``memory``, or 0.

    Each guess lies on the line from the bytes without activations through the last trial.
    """
    low, high = 0, MOST_ROWS + 1  # ``low`` rows fit, ``high`` rows do not
    held, guess, size = sum(known.held.values()), rows, known.peak_bytes
    for _ in range(_TRIES):
        low, high = (guess, high) if size <= memory else (low, guess)
        if high - low <= 1:
            break
        line = int(guess * (memory - held) / max(size - held, 1))
        if line > 2 * MOST_ROWS:  # far from the limit, so another trace is not worth its time
            return MOST_ROWS
        guess = min(max(line, low + 1), high - 1)
        size = peak(guess)
    return low


# ---------------------------------------------------------------------- two steps of the real Trainer, without memory


STEPS = 2
ALONE: Mapping[str, Any] = {**BARE, "max_steps": STEPS}
#: Trainer arguments that are replaced here, or that write files
LEFT_OUT = frozenset(
    ("max_time", "num_nodes", "plugins", "callbacks", "logger", "profiler", "ckpt_path", "default_root_dir")
)


class _Follow(Callback):
    """Reports the pass of the run to the storages, and names the storages of parameters, gradients and state."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self.first: int | None = None
        self.end = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step < STEPS:
            self._name(trainer, pl_module)
        if self.first is None:
            self.first = len(self._storages.events)
        self._storages.in_forward = True

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        self._storages.in_forward = False

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._name(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._storages.in_forward = False
        self._name(trainer, pl_module)
        if trainer.global_step == STEPS and not self.end:
            self.end = len(self._storages.events)

    def _name(self, trainer: Trainer, module: LightningModule) -> None:
        parameters = list(module.parameters())
        states = (optimizer.state.values() for optimizer in trainer.optimizers)
        self._storages.name(parameters, "parameters")
        self._storages.name(module.buffers(), "buffers")
        self._storages.name((parameter.grad for parameter in parameters), "gradients")
        self._storages.name(
            (each for state in chain.from_iterable(states) for each in state.values()), "optimizer_state"
        )


@contextmanager
def _kept() -> Generator[None, None, None]:
    """Within, silence warnings and logs up to ERROR, and let Lightning start no process.

    ``print`` still prints. On exit the rank is restored, and all that ``process_kept`` restores.
    """
    rank = getattr(rank_zero_only, "rank", None)
    try:
        with quietly(logging.ERROR), process_kept(torch.device("cpu")), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            os.environ["LOCAL_RANK"] = "0"
            yield
    finally:
        cast("Any", rank_zero_only).rank = rank


def traced(
    module: nn.Module, batch: Any, plan: MixedPrecisionPlan, trainer_args: Mapping[str, Any]
) -> MemoryPrediction:
    """Return the prediction of ``STEPS`` optimizer steps on copies without memory.

    ``trainer_args`` has the strategy and the devices.

    Raises:
        Exception: any exception of the module, the plan or torch on tensors whose values are unknown.
    """
    device = torch.device("cpu")  # of the copy; Lightning moves it
    on_cuda = torch.cuda.is_available() and trainer_args.get("accelerator", "auto") in ("auto", "gpu", "cuda")
    storages = Storages("cuda" if on_cuda else "cpu")  # sizes are the same on a GPU that this machine lacks
    follow, arguments = _Follow(storages), {key: each for key, each in trainer_args.items() if key not in LEFT_OUT}
    arguments |= {"accelerator": storages.device, **ALONE, "callbacks": [follow]}
    ranks = arguments.get("devices", 1)
    modes = moved_in_place(), fakes_unnoticed(), resizes_told(storages.resized)
    with ExitStack() as stack:
        for mode in (_kept(), *modes, FakeTensorMode(allow_non_fake_inputs=True)):
            stack.enter_context(mode)
        if ranks > 1 or arguments.get("strategy", "auto") not in ("auto", "ddp"):
            stack.enter_context(fake_ranks(ranks, known))
            arguments["plugins"] = [LightningEnvironment()]
        mine = MixedPrecisionPlan.from_policy(plan.policy)
        trainer = Trainer(**trainer_kwargs(mine, logger=DummyLogger(), **arguments))
        stack.enter_context(storages)
        stack.enter_context(FakeCopies(device))
        copied = fake_module(module, device)
        # These hooks of the user may write files or fetch data.
        copied.configure_callbacks, copied.prepare_data = list, lambda: None
        trainer.fit(copied, train_dataloaders=repeat(fake_batch(batch, device)))
    events, end = storages.events, follow.end or len(storages.events)
    # Mostly the peak of the second step. Adafactor copies the weights before its first step.
    size, parts = peak(events, follow.first or 0, end)
    workspaces = cublas_workspaces() if on_cuda else 0
    parts["other"] += workspaces
    return MemoryPrediction(size + workspaces, parts, alive(events, end), "traced")


def cublas_workspaces() -> int:
    """Return the bytes of cuBLAS's workspaces: one for the thread of the forward pass, one for the backward pass.

    The sizes are torch's defaults (aten/src/ATen/cuda/CublasHandlePool.cpp). On an H100 a trace was too low by them.
    """
    of_each = 32 * 2**20 if torch.cuda.get_device_capability() >= (9, 0) else 8 * 2**20 + 128 * 2**10
    return 2 * of_each
