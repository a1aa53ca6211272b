"""Activation checkpointing by module: recompute in the backward pass what the plan does not keep."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_mp.compat import torch as compat
from lightning_mp.compat.torch_fake import is_fake
from lightning_mp.errors import Faults, did_you_mean
from lightning_mp.modules import class_swap
from lightning_mp.modules.patterns import called_in, matches, named_submodules, no_match, not_scripted
from lightning_mp.numerics.dtypes import default_dtype
from lightning_mp.policy import Checkpointing

Values = dict[str, Tensor | None]
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


class _Running(threading.local):
    """Whether the forward of a checkpointed module is under way, or is run again."""

    on = False


_running = _Running()


class CheckpointedForward(class_swap.Swapped):
    """Stores the inputs of a module's forward and runs it again in the backward pass."""

    lmp_state = ("_lmp_checkpoint", "_lmp_changing")
    _lmp_checkpoint: CheckpointState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, checkpointed wherever gradients are on."""
        run = cast("Any", super()).forward
        state = self.__dict__.get("_lmp_checkpoint")
        compiling = torch.compiler.is_compiling()
        if state is None or not torch.is_grad_enabled() or (state.in_container and (compiling or _running.on)):
            return run(*args, **kwargs)
        options: dict[str, Any] = {"preserve_rng_state": state.preserve_rng}
        if compiling:  # a compiled graph changes buffers at its end, once
            if state.save_ops is not None:
                options["context_fn"] = partial(_selective_contexts, state.save_ops)
        else:
            options["context_fn"] = partial(_contexts, state.save_ops, _Buffers(cast("nn.Module", self)))
            run = partial(_marked, run)
        # Not the reentrant form: with frozen inputs (LoRA) it computes no gradients at all.
        return checkpoint(run, *args, use_reentrant=False, **options, **kwargs)


def _marked(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before, _running.on = _running.on, True
    try:
        return run(*args, **kwargs)
    finally:
        _running.on = before


class _Buffers:
    """The buffers below a module as they were before a forward, for where it is run again.

    Else the recomputation would count a batch twice in the statistics of a batch norm, and compute something else where
    an output depends on a buffer that forward changes (the vectors of a spectral norm, an EMA). Copied are those that
    changed in the first forward, in training and in evaluation, or in a later one.
    """

    def __init__(self, module: nn.Module) -> None:
        learnt: dict[tuple[str, bool], dict[str, bool]] = module.__dict__.setdefault("_lmp_changing", {})
        #: which change, by name; the buffers themselves; as they were; copies of those that may change
        self._found: list[tuple[dict[str, bool], Values, Values, Values]] = []
        for name, one in module.named_modules():
            buffers = compat.buffers_of(one)
            if buffers:
                known = learnt.setdefault((name, one.training), {})
                may_change = {key: old for key, old in buffers.items() if known.get(key, True)}
                self._found.append((known, buffers, dict(buffers), _copied(may_change)))
        self._versions = [compat.versions(before.values()) for _, _, before, _ in self._found]

    def learn(self) -> None:
        """After the forward: let go of the copies of what it left as it was."""
        for (known, buffers, before, copies), versions in zip(self._found, self._versions, strict=True):
            written = [one != two for one, two in zip(versions, compat.versions(before.values()), strict=True)]
            for (key, old), changed in zip(before.items(), written, strict=True):
                moved = changed or buffers.get(key) is not old
                if key not in known and not moved and old is not None and not is_fake(old):
                    moved = not torch.equal(old, cast("Tensor", copies[key]))  # written to through .data
                known[key] = known.get(key, False) or moved
                if not known[key]:
                    copies.pop(key, None)

    @contextmanager
    def restored(self) -> Generator[None, None, None]:
        """Within, they are as they were; afterwards as they were before."""
        # Other tensors for the time being: to write into those that are there would spoil what autograd has saved.
        now = [dict(buffers) for _, buffers, _, _ in self._found]
        for _, buffers, before, copies in self._found:
            buffers.update({**before, **_copied(copies)})
        try:
            yield
        finally:
            for (_, buffers, _, _), values in zip(self._found, now, strict=True):
                buffers.update(values)


@contextmanager
def _learning(buffers: _Buffers) -> Generator[None, None, None]:
    yield
    buffers.learn()


class _Again:
    """A context as often as it is entered, made anew each time."""

    def __init__(self, *contexts: Callable[[], AbstractContextManager[Any]]) -> None:
        self._contexts = contexts
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        for make in self._contexts:
            stack.enter_context(make())
        self._entered.append(stack)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def _contexts(save_ops: frozenset[str] | None, buffers: _Buffers) -> tuple[Any, Any]:
    """Around the forward, and around each time it is run again."""
    learning = _learning(buffers)
    # a true mode sets the default dtype for the forward alone, and the backward pass runs after it
    same_dtype = partial(default_dtype, torch.get_default_dtype())
    if save_ops is None:
        return learning, _Again(buffers.restored, same_dtype)
    forward, again = _selective_contexts(save_ops)
    return _Again(lambda: learning, lambda: forward), _Again(buffers.restored, same_dtype, lambda: again)


def _copied(buffers: Mapping[str, Tensor | None]) -> Values:
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
            not_scripted(name, module, "checkpointing", faults)
            outermost.update((id(called), called) for called in called_in(module))
    return list(outermost.values())[:: config.every]


def apply(root: nn.Module, modules: Iterable[nn.Module], config: Checkpointing) -> ExitStack:
    """Checkpoint ``modules`` in place; closing the result undoes all of it.

    transformers models below ``root`` get ``use_cache=False``, and input gradients where their embeddings are frozen
    (LoRA).
    """
    applied = ExitStack()
    names = None if config.mode == "full" else frozenset(_op_names(config.save_ops or DEFAULT_SAVE_OPS))
    state = CheckpointState(names, config.preserve_rng)
    chosen = list(modules)
    for module, each in [*((module, state) for module in chosen), *_iterated(chosen, state)]:
        class_swap.swap_in(module, CheckpointedForward, _lmp_checkpoint=each)
        applied.callback(class_swap.swap_out, module, CheckpointedForward)
    _without_cache(root, applied)
    _with_input_gradients(root, applied)
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


def _with_input_gradients(root: nn.Module, applied: ExitStack) -> None:
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
            applied.callback(model.disable_input_require_grads)
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
