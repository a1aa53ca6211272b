"""Activation checkpointing that trains nothing, or that meets a key-value cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from lightning_mp.compat.torch import has_forward_hooks, reentrant
from lightning_mp.compat.transformers import checkpointing_function
from lightning_mp.modules.class_swap import original_class
from lightning_mp.monitor.doctor.case import Case, below, listed, many
from lightning_mp.monitor.events import Severity
from lightning_mp.monitor.findings import Finding


@dataclass(frozen=True, slots=True)
class Block:
    """A module that recomputes its activations; ``reentrant`` ones compute no gradients for inputs without them."""

    name: str
    module: nn.Module
    reentrant: bool
    #: transformers does it, and turns caches off in the blocks that it checkpoints
    by_transformers: bool


def no_input_gradients(case: Case) -> Iterator[Finding]:
    """Reentrant checkpointing of blocks whose inputs need no gradient (LoRA): nothing in them is trained.

    The plan's own checkpointing and every other non-reentrant one train as they should. Where anything trained may lie
    before the blocks, or a hook may turn gradients on, nothing is said.
    """
    blocks = [block for block in _blocks(case) if block.reentrant]
    inside = {id(parameter) for block in blocks for parameter in block.module.parameters()}
    trained = [name for name, _, parameter in case.trained if id(parameter) in inside]
    if not trained or _hooked(case, blocks):
        return
    behind = _behind(case, blocks)
    others = [(name, module) for name, module, parameter in case.trained if id(parameter) not in inside]
    if any(id(module) not in behind for _, module in others):
        return
    what = f"reentrant checkpointing of {many(len(blocks), 'block')} whose inputs require no gradient"
    kind = original_class(blocks[0].module).__name__
    instead = f"checkpointing={kind!r}" if case.policy is not None else f"ActivationCheckpointing({kind!r})"
    rest = f"only {others[0][0]} and what is behind do" if others else "nothing is left to train and backward raises"
    yield Finding(
        name="lora_checkpoint_no_input_grads",
        severity="error",
        what=f"{what}: {listed([block.name for block in blocks])}",
        why=f"{many(len(trained), 'trained weight')} in there get no gradient; {rest}",
        fix="call model.enable_input_require_grads(), or checkpoint with gradient_checkpointing_kwargs="
        f"{{'use_reentrant': False}}, or call model.gradient_checkpointing_disable() and use {instead}",
        where=blocks[0].name,
    )


def use_cache(case: Case) -> Iterator[Finding]:
    """A key-value cache that is filled again by every recomputation."""
    blocks = list(_blocks(case))
    by_plan = case.policy is not None and case.policy.checkpointing is not None
    for name, module in case.modules:
        model = cast("Any", module)
        if not hasattr(type(module), "can_generate") or not model.can_generate():
            continue
        if getattr(model.config, "use_cache", False) is not True:
            continue
        mine = [block for block in blocks if below(block.name, name)]
        if mine or by_plan:
            severity, why = _cached(mine)
            yield Finding(
                name="use_cache_while_checkpointing",
                severity=severity,
                what="config.use_cache is on while activations are recomputed",
                why=why,
                fix="set model.config.use_cache = False for training, and on again to generate",
                where=name or None,
            )


def _cached(blocks: list[Block]) -> tuple[Severity, str]:
    foreign = [block for block in blocks if not block.by_transformers]
    if any(block.reentrant for block in foreign):
        return "error", "the recomputation finds the cache of the forward pass and attends to it: gradients are wrong"
    if foreign:
        return (
            "warning",
            "keys and values of every layer are kept, much of the memory that checkpointing should save",
        )
    if blocks:
        return "warning", "transformers turns the cache off in every forward of these blocks, and logs it once"
    return "info", "the plan turns it off while it runs, and back on afterwards"


def _blocks(case: Case) -> Iterator[Block]:
    """What is checkpointed now, outermost torch wrappers and innermost transformers modules."""
    flagged = {name: module for name, module in case.modules if _by_transformers(module)}
    for name, module in case.modules:
        wrapped = reentrant(module)
        if wrapped is not None:
            yield Block(name, module, wrapped, by_transformers=False)
        elif name in flagged:
            keywords = getattr(checkpointing_function(module), "keywords", {})
            for at, block in _members(name, module, flagged):
                yield Block(at, block, keywords.get("use_reentrant") is not False, by_transformers=True)


def _by_transformers(module: nn.Module) -> bool:
    on = getattr(module, "gradient_checkpointing", False) is True and module.training
    return on and checkpointing_function(module) is not None


def _members(name: str, module: nn.Module, flagged: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The module itself; for a model whose flag speaks for its layers, these."""
    if any(other != name and below(other, name) for other in flagged):
        return  # its layers are flagged themselves
    lists = [(key, child) for key, child in module.named_children() if isinstance(child, nn.ModuleList)]
    if not lists:
        yield name, module
    for key, layers in lists:
        yield from ((".".join(filter(None, (name, key, at))), layer) for at, layer in layers.named_children())


def _hooked(case: Case, blocks: list[Block]) -> bool:
    """Whether a hook outside the blocks may make their inputs require gradients."""
    within = {id(module) for block in blocks for module in block.module.modules()} - {id(b.module) for b in blocks}
    return any(has_forward_hooks(module) for _, module in case.modules if id(module) not in within)


def _behind(case: Case, blocks: list[Block]) -> set[int]:
    """Modules that run after the blocks for certain: in the same transformers model, and defined after the last."""
    names = [name for name, module in case.modules if hasattr(type(module), "get_input_embeddings")]
    home = next((name for name in names if all(below(block.name, name) for block in blocks)), None)
    if home is None:
        return set()
    last = max(at for at, (name, _) in enumerate(case.modules) if any(below(name, block.name) for block in blocks))
    return {id(module) for name, module in case.modules[last + 1 :] if below(name, home)}
