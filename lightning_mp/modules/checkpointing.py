"""Activation checkpointing by module: recompute a module's activations in the backward pass."""

import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_mp.compat import torch as compat
from lightning_mp.compat.torch_fake import is_fake
from lightning_mp.compat.transformers import copied_cache, is_cache
from lightning_mp.errors import Faults, PlanError, did_you_mean
from lightning_mp.modules.patterns import (
    Swapped,
    called_in,
    check_changeable,
    covering,
    named_submodules,
    original_class,
    swap_in,
    swap_out,
)
from lightning_mp.numerics.dtypes import default_dtype
from lightning_mp.policy import Checkpointing

#: operators whose results ``mode="selective"`` keeps by default: matrix products and attention.
#: They cost the most time for the memory saved (torchtitan's distributed/activation_checkpoint.py).
DEFAULT_SAVE_OPS = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", *compat.FUSED_ATTENTION),
    # the largest magnitudes for FP8 scales: small, and each takes a pass over a whole tensor
    *("amax", "max.default"),
)


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """The state of a checkpointed module that its forward reads."""

    #: operators whose results are kept; None recomputes all
    save_ops: frozenset[str] | None
    preserve_rng: bool
    #: True for a module that code may call in place of the chosen module above it
    in_container: bool
    #: not empty once the forward of the chosen module, or of one in its place, was checkpointed
    seen: list[bool]


#: ``on``: True while this thread runs or recomputes the forward of a checkpointed module
_running = threading.local()


class CheckpointedForward(Swapped):
    """Mix-in of a module that keeps the inputs of its forward, and runs it again in the backward pass."""

    lmp_state = ("_lmp_checkpoint", "_lmp_changing")
    _lmp_checkpoint: CheckpointState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, checkpointed if gradients are on.

        It is not checkpointed again within the chosen module that it may be called in place of.

        Raises:
            PlanError: in the backward pass, the recomputation fails because of a tensor's size.
        """
        run, state = cast("Any", super()).forward, self.__dict__.get("_lmp_checkpoint")
        compiling = torch.compiler.is_compiling()
        inside = compiling or getattr(_running, "on", False)
        if state is None or not torch.is_grad_enabled() or (state.in_container and inside):
            return run(*args, **kwargs)
        options: dict[str, Any] = {"preserve_rng_state": state.preserve_rng}
        if not compiling:  # a compiled graph writes its buffers once, at its end
            run = _WithBuffers(cast("nn.Module", self), run, state.save_ops)
            state.seen[:] = [True]
            # an early stop within a compiled graph would skip the Python code after the graph
            options["early_stop"] = not compat.is_compiled(cast("nn.Module", self))
        elif state.save_ops is not None:
            options["context_fn"] = partial(_selective_contexts, state.save_ops)
        # the reentrant form computes no gradients at all with frozen inputs (LoRA)
        return checkpoint(run, *args, use_reentrant=False, **options, **kwargs)


#: matches torch's errors about sizes of tensors
_OF_SIZES = re.compile("size|shape|dimension|out of range|out of bounds")
#: the name of a module, the key of its buffer, and whether it is training
_Place = tuple[str, str, bool]


class _WithBuffers:
    """A module's forward, whose recomputations see the buffers, caches and default dtype of the first run.

    Otherwise a batch would count twice in a batch norm's statistics. And if an output depends on a
    buffer that the forward changes (a spectral norm's vectors, an EMA), it would differ.

    The first forward in training, and the first in evaluation, copies all buffers. Later forwards
    copy only buffers that changed before. A buffer that is found to change later is copied from
    then on.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any], save_ops: frozenset[str] | None) -> None:
        self._run, self._done, self._name = run, False, original_class(module).__name__
        #: by position or keyword, copies of transformers' caches among the arguments
        self._caches: dict[int | str, Any] = {}
        self._modes = (nullcontext(), nullcontext()) if save_ops is None else _selective_contexts(save_ops)
        # a true mode sets the default dtype only for the forward, not for the backward pass
        self._dtype = torch.get_default_dtype()
        #: True for a buffer that forward changes; kept on the module for its later forwards
        self._changing: dict[_Place, bool] = vars(module).setdefault("_lmp_changing", {})
        #: the dict that holds each buffer, the buffer, and its version counter
        self._before: dict[_Place, tuple[dict[str, Any], Tensor | None, int | None]] = {
            (name, key, part.training): (buffers, tensor, compat.version(tensor))
            for name, part in module.named_modules()
            for buffers in [compat.buffers_of(part)]
            for key, tensor in buffers.items()
        }
        may_change = [place for place in self._before if self._changing.get(place, True)]
        self._copies = {place: _copied(self._before[place][1]) for place in may_change}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward at the first call, and recompute it at later calls.

        Raises:
            PlanError: a recomputation fails with an error about a tensor's size.
        """
        if not self._done:
            given = dict(enumerate(args)) | kwargs
            self._caches = {key: copied_cache(value) for key, value in given.items() if is_cache(value)}
            with self._first(), _under_way(), self._modes[0]:
                return self._run(*args, **kwargs)
        # caches have grown since the first run, so the recomputation is given copies
        caches = {key: copied_cache(value) for key, value in self._caches.items()}
        args = tuple(caches.get(index, value) for index, value in enumerate(args))
        kwargs = {key: caches.get(key, value) for key, value in kwargs.items()}
        try:
            # the selective mode is innermost: it refuses operators that the forward did not have
            with self._again(), _under_way(), self._modes[1]:
                return self._run(*args, **kwargs)
        except RuntimeError as error:
            if type(error) is not RuntimeError or _OF_SIZES.search(str(error)) is None:
                raise
            raise PlanError.of(
                f"checkpointing of a {self._name}, whose forward failed when it was run again: {error}",
                "leave it out of checkpointing=, or give it nothing that it changes, such as a cache",
            ) from error

    @contextmanager
    def _first(self) -> Generator[None, None, None]:
        """Run the forward within. At the end, drop the copies of buffers that it did not change."""
        yield
        self._done = True
        for place, (buffers, old, version) in self._before.items():
            changed = buffers.get(place[1]) is not old or compat.version(old) != version
            if place not in self._changing and not changed and old is not None and not is_fake(old):
                changed = not torch.equal(old, cast("Tensor", self._copies[place]))  # written to through .data
            self._changing[place] = changed = changed or self._changing.get(place, False)
            if not changed:
                self._copies.pop(place, None)

    @contextmanager
    def _again(self) -> Generator[None, None, None]:
        """Put copies of the first run's buffers in place for a recomputation, and undo it at the end.

        The copies are new tensors, because a write to the present buffers would invalidate tensors
        that autograd saved.
        """
        now = {place: buffers.get(place[1]) for place, (buffers, _, _) in self._before.items()}
        for place, (buffers, old, _) in self._before.items():
            buffers[place[1]] = _copied(self._copies[place]) if place in self._copies else old
        try:
            with default_dtype(self._dtype):
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


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _selective_contexts(save_ops: frozenset[str]) -> tuple[Any, Any]:
    def decide(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if str(op) in save_ops else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def select(root: nn.Module, config: Checkpointing, faults: Faults) -> list[nn.Module]:
    """Return the modules that ``config`` checkpoints, in definition order. Nothing is changed.

    Only the outermost of nested matches is returned. A match without a forward, such as a
    ModuleList, stands for the modules in it. With ``config.every`` = n, only every n-th module is
    returned, the first included.

    A fault is added if a pattern matches nothing that is called, a name in ``save_ops`` is no
    operator, or a class cannot be swapped.
    """
    index_of, _ = covering(root, config.patterns, "checkpointing pattern", faults)
    known = dir(torch.ops.aten) + list(DEFAULT_SAVE_OPS)
    for name in config.save_ops or ():
        if not _overloads(name):
            fix = did_you_mean(name.removeprefix("aten."), known, "write 'mm', for instance")
            faults.add(f"save_ops {name!r}", fix=fix)
    outermost: dict[nn.Module, None] = {}
    for name, module in named_submodules(root):
        if name in index_of and name.rpartition(".")[0] not in index_of:
            check_changeable(name, module, "checkpointing", faults)
            outermost.update(dict.fromkeys(called_in(module)))
    if index_of and not outermost:
        given = f"checkpointing {config.patterns[0]!r}, which matches no module with a forward"
        faults.add(given, fix="name modules that are called, such as a block")
    return list(outermost)[:: config.every]


def apply(root: nn.Module, modules: Iterable[nn.Module], config: Checkpointing) -> ExitStack:
    """Checkpoint ``modules`` in place, and set ``use_cache`` to False in transformers' configs.

    Closing the returned stack undoes both.
    """
    applied = ExitStack()
    ops = config.save_ops or DEFAULT_SAVE_OPS
    names = None if config.mode == "full" else frozenset(chain.from_iterable(map(_overloads, ops)))
    chosen = dict.fromkeys(modules)
    for module in chosen:
        seen = list[bool]()
        for part in dict.fromkeys((module, *_standing_for(module))):
            if isinstance(part, torch.jit.ScriptModule) or (part is not module and part in chosen):
                continue
            state = CheckpointState(names, config.preserve_rng, part is not module, seen)
            swap_in(part, CheckpointedForward, _lmp_checkpoint=state)
            applied.callback(swap_out, part, CheckpointedForward)
    _without_cache(root, applied)
    return applied


def _standing_for(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that code may call in place of a chosen module.

    Code may iterate over a Sequential, or call a method of the module that is not its forward.
    """
    yield from called_in(module, through_sequential=True)
    for child in module.children():
        yield from called_in(child)
        yield from called_in(child, through_sequential=True)


def kept_after_all(root: nn.Module, modules: Iterable[nn.Module]) -> list[str]:
    """Return the names of ``modules`` with gradients whose forward was never checkpointed."""
    names = {module: name for name, module in root.named_modules()}
    kept = list[str]()
    for module in modules:
        state: CheckpointState | None = vars(module).get("_lmp_checkpoint")
        trained = any(parameter.grad is not None for parameter in module.parameters())
        # a pipeline's stage lacks the modules of the other stages
        if state is not None and not state.seen and trained and module in names:
            kept.append(names[module])
    return kept


def _without_cache(root: nn.Module, applied: ExitStack) -> None:
    """Set ``use_cache`` to False in all configs below ``root``, since a recomputation would fill caches twice."""
    for module in root.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False
            applied.callback(setattr, config, "use_cache", True)


def _overloads(name: str) -> list[str]:
    """Return the full names of the overloads of ``"mm"``, ``"aten.mm"`` or ``"aten.mm.default"``.

    The list is empty if aten has no such operator.
    """
    parts = name.replace("::", ".").removeprefix("aten.").split(".")
    packet = getattr(torch.ops.aten, parts[0], None)
    if not isinstance(packet, compat.OpOverloadPacket):
        return []
    wanted = parts[1:] or packet.overloads()
    return [str(getattr(packet, overload)) for overload in wanted if overload in packet.overloads()]
