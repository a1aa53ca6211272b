"""Activation checkpointing by module: recompute in the backward pass what the plan does not keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_mp.compat import torch as compat
from lightning_mp.errors import Faults, did_you_mean
from lightning_mp.modules import class_swap
from lightning_mp.modules.patterns import called_in, matches, named_submodules, no_match
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


class CheckpointedForward(class_swap.Swapped):
    """Stores the inputs of a module's forward and runs it again in the backward pass."""

    _lmp_checkpoint: CheckpointState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, checkpointed wherever gradients are on."""
        run = cast("Any", super()).forward
        state = self.__dict__.get("_lmp_checkpoint")
        if state is None or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        options: dict[str, Any] = {"preserve_rng_state": state.preserve_rng}
        if torch.compiler.is_compiling():  # a compiled graph changes buffers at its end, once
            if state.save_ops is not None:
                options["context_fn"] = partial(_selective_contexts, state.save_ops)
        else:
            options["context_fn"] = partial(_contexts, state.save_ops, _SameBuffers(cast("nn.Module", self)))
        # Not the reentrant form: with frozen inputs (LoRA) it computes no gradients at all.
        return checkpoint(run, *args, use_reentrant=False, **options, **kwargs)


class _SameBuffers:
    """Within, a module's buffers are as they were when this was made; afterwards as they were before.

    Else the recomputation would count a batch twice in the statistics of a batch norm, and compute something else where
    an output depends on a buffer that forward changes (the vectors of a spectral norm, an EMA).
    """

    def __init__(self, module: nn.Module) -> None:
        owners = (compat.buffers_of(submodule) for submodule in module.modules())
        self._found = [(buffers, _copied(buffers)) for buffers in owners if buffers]
        self._now: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []

    def __enter__(self) -> None:
        # Other tensors for the time being: to write into those that are there would spoil what autograd has saved.
        self._now = [(buffers, dict(buffers)) for buffers, _ in self._found]
        for buffers, found in self._found:
            buffers.update(_copied(found))

    def __exit__(self, *_: object) -> None:
        for buffers, values in self._now:
            buffers.update(values)
        self._now = []


class _Both(ExitStack):
    """Two context managers as one, as often as it is entered."""

    def __init__(self, *both: AbstractContextManager[Any]) -> None:
        super().__init__()
        self._both = both

    def __enter__(self) -> Any:
        for one in self._both:
            self.enter_context(one)


def _contexts(save_ops: frozenset[str] | None, same_buffers: _SameBuffers) -> tuple[Any, Any]:
    """Around the forward, and around each time it is run again."""
    if save_ops is None:
        return nullcontext(), same_buffers
    forward, again = _selective_contexts(save_ops)
    return forward, _Both(same_buffers, again)


def _copied(buffers: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if tensor is None else tensor.detach().clone() for name, tensor in buffers.items()}


def _selective_contexts(save_ops: frozenset[str]) -> tuple[Any, Any]:
    def decide(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        kept = str(op) in save_ops
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def select(root: nn.Module, config: Checkpointing, faults: Faults) -> list[nn.Module]:
    """The modules that ``config`` checkpoints, in definition order, without changing anything.

    Of nested matches the outermost counts; a matched container without a forward (``ModuleList``) stands for its
    children. Patterns that match nothing are noted in ``faults``, and so are unknown ``save_ops``.
    """
    named = list(named_submodules(root))
    for pattern in config.patterns:
        if not any(matches(pattern, name, module) for name, module in named):
            no_match(pattern, root, "checkpointing pattern", faults)
    if config.save_ops is not None:
        _check_ops(config.save_ops, faults)
    outermost: dict[int, nn.Module] = {}
    covered: list[str] = []
    for name, module in named:
        if any(name.startswith(f"{above}.") for above in covered):
            continue
        if any(matches(pattern, name, module) for pattern in config.patterns):
            covered.append(name)
            outermost.update((id(called), called) for called in called_in(module))
    return list(outermost.values())[:: config.every]


@dataclass(slots=True)
class Applied:
    """What ``apply`` changed; calling ``undo`` puts all of it back."""

    _undo: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])

    def undo(self) -> None:
        """Restore forwards, ``use_cache`` and the input embeddings' hooks."""
        while self._undo:
            self._undo.pop()()

    def after(self, action: Callable[[], object]) -> None:
        """Note how to undo something just done."""
        self._undo.append(action)


def apply(root: nn.Module, modules: Iterable[nn.Module], config: Checkpointing) -> Applied:
    """Checkpoint ``modules`` in place.

    transformers models below ``root`` get ``use_cache=False``, and input gradients where their embeddings are frozen
    (LoRA).
    """
    applied = Applied()
    names = None if config.mode == "full" else frozenset(_op_names(config.save_ops or DEFAULT_SAVE_OPS))
    state = CheckpointState(names, config.preserve_rng)
    for module in modules:
        object.__setattr__(module, "_lmp_checkpoint", state)
        class_swap.swap_in(module, CheckpointedForward)
        applied.after(partial(_remove, module))
    _without_cache(root, applied)
    _with_input_gradients(root, applied)
    return applied


def _remove(module: nn.Module) -> None:
    class_swap.swap_out(module, CheckpointedForward)
    del module.__dict__["_lmp_checkpoint"]


def _without_cache(root: nn.Module, applied: Applied) -> None:
    """Key-value caches are filled again by the recomputation, and would be filled twice."""
    configs = {id(module.config): module.config for module in root.modules() if hasattr(module, "config")}
    for config in cast("Iterable[Any]", configs.values()):
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False
            applied.after(partial(setattr, config, "use_cache", True))


def _with_input_gradients(root: nn.Module, applied: Applied) -> None:
    """Turn on transformers' input gradients where the embeddings are frozen and something behind them is trained."""
    done: list[nn.Module] = []
    for module in root.modules():
        model = cast("Any", module)
        if not hasattr(module, "enable_input_require_grads") or any(module in set(above.modules()) for above in done):
            continue
        embeddings = _input_embeddings(model)
        if embeddings is None or any(parameter.requires_grad for parameter in embeddings.parameters()):
            continue
        if any(parameter.requires_grad for parameter in module.parameters()):
            model.enable_input_require_grads()
            applied.after(model.disable_input_require_grads)
            done.append(module)


def _input_embeddings(model: Any) -> nn.Module | None:
    """The table that a transformers model looks its inputs up in; models of images and of sound have none."""
    try:
        found = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    except (NotImplementedError, AttributeError):  # transformers 5; 4
        return None
    return found if isinstance(found, nn.Embedding) else None


def _overloads(name: str) -> dict[str, Any]:
    """``"mm"``, ``"aten.mm"`` or ``"aten.mm.default"`` → the overloads it means, by their full names."""
    parts = name.replace("::", ".").removeprefix("aten.").split(".")
    packet = getattr(torch.ops.aten, parts[0], None)
    if not isinstance(packet, compat.OpOverloadPacket):
        return {}
    wanted = parts[1:] or packet.overloads()
    return {str(getattr(packet, overload)): packet for overload in wanted if overload in packet.overloads()}


def _op_names(names: Iterable[str]) -> Iterable[str]:
    for name in names:
        yield from _overloads(name)


def _check_ops(names: Iterable[str], faults: Faults) -> None:
    for name in names:
        if not _overloads(name):
            known = dir(torch.ops.aten) + list(DEFAULT_SAVE_OPS)
            fix = did_you_mean(name.removeprefix("aten."), known, "write 'mm', for instance")
            faults.add(f"save_ops {name!r}", "names of aten operators", fix)
