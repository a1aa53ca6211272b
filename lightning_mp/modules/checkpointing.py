"""Activation checkpointing by module: recompute in the backward pass what the plan does not keep."""

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
    check_changeable,
    matches,
    named_submodules,
    no_match,
    swap_in,
    swap_out,
)
from lightning_mp.numerics.dtypes import default_dtype
from lightning_mp.policy import Checkpointing

#: What ``mode="selective"`` keeps by default: matrix products and attention, whose recomputation costs the most for
#: what it saves (the list of torchtitan's distributed/activation_checkpoint.py, for one device).
DEFAULT_SAVE_OPS = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", *compat.FUSED_ATTENTION),
    # what the scale of an FP8 product is made of: small, and it takes a pass over the whole tensor
    *("amax", "max.default"),
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
        run, state = cast("Any", super()).forward, self.__dict__.get("_lmp_checkpoint")
        compiling = torch.compiler.is_compiling()
        inside = compiling or getattr(_running, "on", False)
        if state is None or not torch.is_grad_enabled() or (state.in_container and inside):
            return run(*args, **kwargs)
        options: dict[str, Any] = {"preserve_rng_state": state.preserve_rng}
        if not compiling:  # a compiled graph changes buffers at its end, once
            options["context_fn"] = partial(_contexts, _Buffers(cast("nn.Module", self)), state.save_ops)
        elif state.save_ops is not None:
            options["context_fn"] = partial(_selective_contexts, state.save_ops)
        # Not the reentrant form: with frozen inputs (LoRA) it computes no gradients at all.
        return checkpoint(run, *args, use_reentrant=False, **options, **kwargs)


#: the name of a module, the key of its buffer, and whether it is training
_Place = tuple[str, str, bool]


class _Buffers:
    """A module's buffers and the default dtype, for the recomputation to find them as the forward did.

    Else it would count a batch twice in the statistics of a batch norm, and compute something else where an output
    depends on a buffer that forward changes (the vectors of a spectral norm, an EMA). Copies are kept of those that
    changed in the first forward, in training and in evaluation, or in a later one.
    """

    def __init__(self, module: nn.Module) -> None:
        # a true mode sets the default dtype for the forward alone, and the backward pass runs after it
        self._dtype = torch.get_default_dtype()
        #: whether a buffer changes
        self._changing: dict[_Place, bool] = vars(module).setdefault("_lmp_changing", {})
        #: the dict that holds each buffer, itself, and how often it was written to
        self._before: dict[_Place, tuple[dict[str, Any], Tensor | None, int | None]] = {
            (name, key, part.training): (buffers, tensor, compat.version(tensor))
            for name, part in module.named_modules()
            for buffers in [compat.buffers_of(part)]
            for key, tensor in buffers.items()
        }
        may_change = [place for place in self._before if self._changing.get(place, True)]
        self._copies = {place: _copied(self._before[place][1]) for place in may_change}

    @contextmanager
    def first(self) -> Generator[None, None, None]:
        """Around the forward: in the end, let go of the copies of what it left as it was."""
        with _under_way():
            yield
        for place, (buffers, old, version) in self._before.items():
            changed = buffers.get(place[1]) is not old or compat.version(old) != version
            if place not in self._changing and not changed and old is not None and not is_fake(old):
                changed = not torch.equal(old, cast("Tensor", self._copies[place]))  # written to through .data
            self._changing[place] = changed = changed or self._changing.get(place, False)
            if not changed:
                self._copies.pop(place, None)

    @contextmanager
    def again(self) -> Generator[None, None, None]:
        """Around each recomputation: other tensors, since writing to those there would spoil what autograd saved."""
        now = {place: buffers.get(place[1]) for place, (buffers, _, _) in self._before.items()}
        for place, (buffers, old, _) in self._before.items():
            buffers[place[1]] = _copied(self._copies[place]) if place in self._copies else old
        try:
            with default_dtype(self._dtype), _under_way():
                yield
        finally:
            for place, (buffers, _, _) in self._before.items():
                buffers[place[1]] = now[place]


@contextmanager
def _under_way() -> Generator[None, None, None]:
    before, _running.on = getattr(_running, "on", False), True
    try:
        yield
    finally:
        _running.on = before


class _Within:
    """Within both contexts; torch enters it for every backward pass through the graph.

    The buffers' own comes first: the mode of selective checkpointing allows no operator that the forward had not.
    """

    def __init__(self, buffers: Callable[[], AbstractContextManager[None]], mode: AbstractContextManager[Any]) -> None:
        self._buffers, self._mode = buffers, mode

    def __enter__(self) -> None:
        self._entered = ExitStack()
        self._entered.enter_context(self._buffers())
        self._entered.enter_context(self._mode)

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _contexts(buffers: _Buffers, save_ops: frozenset[str] | None) -> tuple[_Within, _Within]:
    first, again = (nullcontext(), nullcontext()) if save_ops is None else _selective_contexts(save_ops)
    return _Within(buffers.first, first), _Within(buffers.again, again)


def _selective_contexts(save_ops: frozenset[str]) -> tuple[Any, Any]:
    def decide(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if str(op) in save_ops else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def select(root: nn.Module, config: Checkpointing, faults: Faults) -> list[nn.Module]:
    """The modules that ``config`` checkpoints, the outermost of nested matches, in definition order; change nothing."""
    named = list(named_submodules(root))
    for pattern in config.patterns:
        if not any(matches(pattern, name, module) for name, module in named):
            no_match(pattern, root, "checkpointing pattern", faults)
    known = dir(torch.ops.aten) + list(DEFAULT_SAVE_OPS)
    for name in config.save_ops or ():
        if not _overloads(name):
            fix = did_you_mean(name.removeprefix("aten."), known, "write 'mm', for instance")
            faults.add(f"save_ops {name!r}", fix=fix)
    outermost: dict[int, nn.Module] = {}
    covered: list[str] = []
    for name, module in named:
        if any(name.startswith(f"{above}.") for above in covered):
            continue
        if any(matches(pattern, name, module) for pattern in config.patterns):
            covered.append(name)
            for inner, part in module.named_modules(prefix=name):
                if part is module or not isinstance(part, torch.jit.ScriptModule):  # within, those are left alone
                    check_changeable(inner, part, "checkpointing", faults)
            outermost.update((id(called), called) for called in called_in(module))
    return list(outermost.values())[:: config.every]


def apply(root: nn.Module, modules: Iterable[nn.Module], config: Checkpointing) -> ExitStack:
    """Checkpoint ``modules`` in place, with transformers' caches off; closing the result undoes all of it."""
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
