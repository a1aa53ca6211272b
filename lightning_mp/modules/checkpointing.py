"""Activation checkpointing by module: recompute in the backward pass what the plan does not keep."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_mp.compat import torch as compat
from lightning_mp.compat.torch_fake import is_fake
from lightning_mp.errors import Faults, did_you_mean
from lightning_mp.modules.patterns import (
    Swapped,
    called_in,
    matches,
    named_submodules,
    no_match,
    not_lazy,
    not_scripted,
    swap_in,
    swap_out,
)
from lightning_mp.numerics.dtypes import default_dtype
from lightning_mp.policy import Checkpointing

#: What ``mode="selective"`` keeps by default: matrix products and attention, whose recomputation costs the most for
#: what it saves (the list of torchtitan's distributed/activation_checkpoint.py, for one device).
DEFAULT_SAVE_OPS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_mm",
    # what the scale of an FP8 product is made of: small, and it takes a pass over the whole tensor
    "amax",
    "max.default",
    *compat.FUSED_ATTENTION,
)


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """What a checkpointed module needs in its forward."""

    save_ops: frozenset[str] | None
    preserve_rng: bool
    #: it stands for the module above it, where code calls this one and never that one
    in_container: bool = False


#: by thread, as ``on``, whether the forward of a checkpointed module is under way, or is run again
_running = threading.local()


class CheckpointedForward(Swapped):
    """Stores the inputs of a module's forward and runs it again in the backward pass."""

    lmp_state = ("_lmp_checkpoint", "_lmp_changing")
    _lmp_checkpoint: CheckpointState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, checkpointed wherever gradients are on."""
        run = cast("Any", super()).forward
        state = self.__dict__.get("_lmp_checkpoint")
        compiling = torch.compiler.is_compiling()
        if (
            state is None
            or not torch.is_grad_enabled()
            or (state.in_container and (compiling or getattr(_running, "on", False)))
        ):
            return run(*args, **kwargs)
        options: dict[str, Any] = {"preserve_rng_state": state.preserve_rng}
        # a compiled graph changes buffers at its end, once
        run = run if compiling else _RepeatableForward(cast("nn.Module", self), run)
        if state.save_ops is not None:
            options["context_fn"] = partial(_selective_contexts, state.save_ops, None if compiling else run)
        # Not the reentrant form: with frozen inputs (LoRA) it computes no gradients at all.
        return checkpoint(run, *args, use_reentrant=False, **options, **kwargs)


class _RepeatableForward:
    """A module's forward which, called again, finds the buffers and the default dtype as they were the first time.

    Else the recomputation would count a batch twice in the statistics of a batch norm, and compute something else where
    an output depends on a buffer that forward changes (the vectors of a spectral norm, an EMA). Copied are those that
    changed in the first forward, in training and in evaluation, or in a later one.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        # a true mode sets the default dtype for the forward alone, and the backward pass runs after it
        self._run, self._dtype, self._ran = run, torch.get_default_dtype(), False
        #: by module, key and training mode, whether a buffer changes
        self._changing: dict[tuple[str, str, bool], bool] = vars(module).setdefault("_lmp_changing", {})
        #: the dict that holds each buffer, itself, and how often it was written to
        self._before: dict[tuple[str, str, bool], tuple[dict[str, Any], Tensor | None, int | None]] = {
            (name, key, one.training): (buffers, tensor, compat.version(tensor))
            for name, one in module.named_modules()
            for buffers in [compat.buffers_of(one)]
            for key, tensor in buffers.items()
        }
        may_change = [place for place in self._before if self._changing.get(place, True)]
        self._copies = {place: _copied(self._before[place][1]) for place in may_change}
        #: copies of them for the next recomputation, which may write to them
        self._spare: dict[tuple[str, str, bool], Tensor | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        again, self._ran = self._ran, True
        before, _running.on = getattr(_running, "on", False), True
        try:
            with self._as_before() if again else nullcontext():
                output = self._run(*args, **kwargs)
        finally:
            _running.on = before
        if not again:
            self._drop_unchanged()
        return output

    def copy_buffers(self) -> None:
        """Make the copies that the next recomputation is given."""
        self._spare = {place: _copied(copy) for place, copy in self._copies.items()}

    def _drop_unchanged(self) -> None:
        """After the first forward: let go of the copies of what it left as it was."""
        for place, (buffers, old, version) in self._before.items():
            changed = buffers.get(place[1]) is not old or compat.version(old) != version
            if place not in self._changing and not changed and old is not None and not is_fake(old):
                changed = not torch.equal(old, cast("Tensor", self._copies[place]))  # written to through .data
            self._changing[place] = changed = changed or self._changing.get(place, False)
            if not changed:
                self._copies.pop(place, None)

    @contextmanager
    def _as_before(self) -> Generator[None, None, None]:
        # Other tensors for the time being: to write into those that are there would spoil what autograd has saved.
        now = {place: buffers.get(place[1]) for place, (buffers, _, _) in self._before.items()}
        if not self._spare:
            self.copy_buffers()
        for place, (buffers, old, _) in self._before.items():
            buffers[place[1]] = self._spare.get(place, old)
        self._spare = {}
        try:
            with default_dtype(self._dtype):
                yield
        finally:
            for place, (buffers, _, _) in self._before.items():
                buffers[place[1]] = now[place]


class _Recomputing:
    """Around each recomputation of selective checkpointing, whose mode allows no operator that the forward had not."""

    def __init__(self, forward: _RepeatableForward, mode: Any) -> None:
        self._forward, self._mode = forward, mode

    def __enter__(self) -> None:
        self._forward.copy_buffers()
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _selective_contexts(save_ops: frozenset[str], run: _RepeatableForward | None) -> tuple[Any, Any]:
    def decide(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        kept = str(op) in save_ops
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    first, again = create_selective_checkpoint_contexts(decide)
    return first, again if run is None else _Recomputing(run, again)


def select(root: nn.Module, config: Checkpointing, faults: Faults) -> list[nn.Module]:
    """The modules that ``config`` checkpoints, in definition order, without changing anything.

    Of nested matches the outermost counts; a matched container without a forward (``ModuleList``) stands for its
    children. Patterns that match nothing are noted in ``faults``, and so are unknown ``save_ops``.
    """
    named = list(named_submodules(root))
    for pattern in config.patterns:
        if not any(matches(pattern, name, module) for name, module in named):
            no_match(pattern, root, "checkpointing pattern", faults)
    for name in config.save_ops or ():
        if not _overloads(name):
            known = dir(torch.ops.aten) + list(DEFAULT_SAVE_OPS)
            faults.add(
                f"save_ops {name!r}", fix=did_you_mean(name.removeprefix("aten."), known, "write 'mm', for instance")
            )
    outermost: dict[int, nn.Module] = {}
    covered: list[str] = []
    for name, module in named:
        if any(name.startswith(f"{above}.") for above in covered):
            continue
        if any(matches(pattern, name, module) for pattern in config.patterns):
            covered.append(name)
            not_scripted(name, module, "checkpointing", faults)
            for inner, one in module.named_modules(prefix=name):
                not_lazy(inner, one, "checkpointing", faults)
            outermost.update((id(called), called) for called in called_in(module))
    return list(outermost.values())[:: config.every]


def apply(root: nn.Module, modules: Iterable[nn.Module], config: Checkpointing) -> ExitStack:
    """Checkpoint ``modules`` in place; closing the result undoes all of it.

    transformers models below ``root`` get ``use_cache=False``.
    """
    applied = ExitStack()
    ops = config.save_ops or DEFAULT_SAVE_OPS
    names = None if config.mode == "full" else frozenset(chain.from_iterable(map(_overloads, ops)))
    state = CheckpointState(names, config.preserve_rng)
    chosen = list(modules)
    for module, each in [*((module, state) for module in chosen), *_iterated(chosen, state)]:
        swap_in(module, CheckpointedForward, _lmp_checkpoint=each)
        applied.callback(swap_out, module, CheckpointedForward)
    _without_cache(root, applied)
    return applied


def _iterated(modules: Iterable[nn.Module], state: CheckpointState) -> Iterable[tuple[nn.Module, CheckpointState]]:
    """All below: where code reaches into a module and never calls it, the outermost that it calls stand for it."""
    for module in modules:
        children = (child for child in module.children() if not isinstance(child, torch.jit.ScriptModule))
        inner = list({id(called): called for child in children for called in called_in(child)}.values())
        yield from ((one, replace(state, in_container=True)) for one in inner)
        yield from _iterated(inner, state)


def _without_cache(root: nn.Module, applied: ExitStack) -> None:
    """Key-value caches are filled again by the recomputation, and would be filled twice."""
    configs = {id(module.config): module.config for module in root.modules() if hasattr(module, "config")}
    for config in cast("Iterable[Any]", configs.values()):
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False
            applied.callback(setattr, config, "use_cache", True)


def _overloads(name: str) -> list[str]:
    """``"mm"``, ``"aten.mm"`` or ``"aten.mm.default"`` → the full names of the overloads it means."""
    parts = name.replace("::", ".").removeprefix("aten.").split(".")
    packet = getattr(torch.ops.aten, parts[0], None)
    if not isinstance(packet, compat.OpOverloadPacket):
        return []
    wanted = parts[1:] or packet.overloads()
    return [str(getattr(packet, overload)) for overload in wanted if overload in packet.overloads()]
