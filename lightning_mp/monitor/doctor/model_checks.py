"""Checks of the model itself: its weights, modes, sizes, norms, and what it recomputes."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import getsource
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from lightning_mp.compat.lightning import DeepSpeedStrategy, LightningModule
from lightning_mp.compat.torch import cpu_has, has_forward_hooks, reentrant
from lightning_mp.compat.transformers import checkpointing_function, conv1d
from lightning_mp.errors import counted
from lightning_mp.modules.class_swap import original_class
from lightning_mp.monitor.doctor.case import HALF, ModelUnderTest, below, listed
from lightning_mp.monitor.doctor.table import fact
from lightning_mp.monitor.events import Severity, pinning
from lightning_mp.monitor.findings import Finding
from lightning_mp.numerics.dtypes import dtype_name, to_torch
from lightning_mp.policy import hardware

#: bits of the significand, the hidden one included
_BITS = {"bf16": 8, "fp16": 11}
#: 16 bytes, of what the product runs in: NVIDIA's "Deep Learning Performance Guide", matrix multiplication,
#: https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/ (table 1)
_MULTIPLES = {"fp16": 8, "bf16": 8, "fp8": 16}
#: below this part of the weights that are multiplied, odd sizes (a head with 10 classes) cost nothing worth naming
_SHARE = 0.1
#: a table as small as this holds segments or classes, no vocabulary
_SMALL_TABLE = 32


# ---------------------------------------------------------------------- modes and weights


def eval_mode(case: ModelUnderTest) -> Iterator[Finding]:
    """Modules with trainable weights in eval mode, which Lightning has not changed since 2.2."""
    tops: list[str] = []
    for name, module in case.modules:
        if module.training or any(below(name, top) for top in tops):
            continue
        # A frozen part belongs in eval mode, and so may a norm whose statistics are to stay.
        alone = bool(name) and "norm" in type(module).__name__.lower() and next(module.children(), None) is None
        if not alone and any(parameter.requires_grad for parameter in module.parameters()):
            tops.append(name)
    if tops:
        root = "self" if isinstance(case.model, LightningModule) else "model"
        one = ".".join(filter(None, (root, tops[0]))) if len(tops) == 1 else "each"
        yield fact("eval_mode", f"in eval mode with trainable weights: {listed(tops)}", tops[0], module=one)


def half_weights(case: ModelUnderTest) -> Iterator[Finding]:
    """Trained weights that are in half precision alone: as loaded, by the mode, or by a pin."""
    if case.storage in HALF:
        names = [name for name, _, parameter in case.trained if case.stored(parameter) in HALF]
        if names:
            mixed = case.precision.replace("true", "mixed") if case.precision.endswith("true") else "bf16-mixed"
            what = f"{case.precision} trains {counted(len(names), 'weight')}, stored in {case.storage} alone"
            yield fact("no_fp32_masters:mode", what, mixed=mixed, dtype=case.storage, bits=_BITS[case.storage])
        return
    names = [name for name, _, parameter in case.trained if case.pinned.get(id(parameter)) in HALF]
    if names:
        what = f"pins store {counted(len(names), 'trained weight')} in half precision: {listed(names)}"
        yield fact("no_fp32_masters:pin", what, names[0])
    by = "stock" if case.policy is None else "plan"
    loaded = {name: dtype_name(p.dtype) for name, _, p in case.trained if id(p) not in case.pinned}
    found = {name: dtype for name, dtype in loaded.items() if dtype in HALF}
    if found and (case.policy is not None or case.storage is None):
        dtype = next(iter(found.values()))
        what = f"{counted(len(found), 'trained weight')} in {dtype} under {case.precision}: {listed(found)}"
        words: dict[str, Any] = {"precision": case.precision, "dtype": dtype, "bits": _BITS[dtype]}
        yield fact(f"no_fp32_masters:{by}", what, next(iter(found)), **words)
    refused = [name for name, dtype in found.items() if dtype == "fp16"]
    sharded = isinstance(case.strategy, DeepSpeedStrategy) or "deepspeed" in str(case.strategy)
    if refused and case.precision == "16-mixed" and (case.policy is not None or not sharded):
        what = f"{counted(len(refused), 'trained weight')} in fp16 under a loss scale: {listed(refused)}"
        yield fact(f"fp16_params_under_scaler:{by}", what, refused[0])


def tied_pins(case: ModelUnderTest) -> Iterator[Finding]:
    """A tied weight whose two names are pinned to different dtypes."""
    for fault in case.resolved_pins[1].found:
        said, _, names = fault.given.partition(": ")
        if said == "contradicting pins on tied weights":
            what = f"tied weights are pinned to different dtypes: {names}"
            yield fact("tied_weights_conflicting_pins", what, names.partition(" ")[0], change=fault.fix)


# ---------------------------------------------------------------------- the device


def device_cannot(case: ModelUnderTest) -> Iterator[Finding]:
    """A precision that the device emulates in fp32, or does not compute: there the run is refused."""
    device, bf16_pins = case.device, [pin.pattern for pin in case.pins if pin.dtype == "bf16"]
    refused = hardware.refusal(device, case.precision, emulate=case.fp8 is not None and case.fp8.anywhere)
    if device.bf16 != "native" and (case.compute == "bf16" or bf16_pins):
        effect = "the run is refused" if refused else "results are correct, but no faster than in fp32"
        severity: Severity | None = "error" if refused else "info" if device.type == "cpu" else None
        instead = "'16-mixed', with loss scaling" if device.fp16 and device.type != "cpu" else "'32-true'"
        says = "has no bf16" if device.bf16 == "none" else "computes bf16 in fp32 and rounds"
        pinned = f" with bf16 pins on {listed(bf16_pins)}" if bf16_pins else ""
        what = f"{device.name} {says}, under {case.precision}{pinned}"
        yield fact("bf16_emulated", what, severity=severity, effect=effect, instead=instead)
    elif refused is not None and (device.type != "cuda" or device.capability is not None):
        given, needed, fix = refused
        yield fact("precision_refused", given, "precision", needed=needed, change=fix)


def strategy_cannot(case: ModelUnderTest) -> Iterator[Finding]:
    """A plan that ZeRO-3, ZeRO's offload or FSDP1 does not carry out: there the run is refused."""
    word = case.strategy.lower() if isinstance(case.strategy, str) else type(case.strategy).__name__.lower()
    stage3 = isinstance(case.strategy, DeepSpeedStrategy) and case.strategy.zero_stage_3
    masters = stage3 or "zero3" in word or ("zero" in word and "offload" in word)
    if case.policy is None:
        return
    if masters and case.policy.storage_dtype != "fp32":
        needed = "a mixed mode, since this strategy keeps fp32 master weights"
        change = f"use {case.precision.replace('true', 'mixed')!r}, or strategy='mp_fsdp2' or 'mp_deepspeed_zero2'"
        yield fact("precision_refused", f"{case.precision} with ZeRO-3 or its offload", needed=needed, change=change)
    if case.pins and "fsdp1" in word:
        change = "use strategy='mp_fsdp2'"
        yield fact("precision_refused", "pins with FSDP1", needed="a plan without pins", change=change)


def no_fp16_lstm(case: ModelUnderTest) -> Iterator[Finding]:
    """An LSTM in fp16 on this CPU, whose oneDNN has none: there the run is refused."""
    in_fp16 = case.policy is not None and case.mixed and case.compute == "fp16" and case.device.type == "cpu"
    if not in_fp16 or cpu_has(torch.float16):
        return
    kept = (
        name for name, one in case.modules if isinstance(one, nn.LSTM) and case.pinned.get(id(one), "fp16") == "fp16"
    )
    for name in kept:
        change = "pin it: pins={'LSTM': 'fp32'}"
        yield fact(
            "precision_refused", f"nn.LSTM {name!r} in fp16", name, needed="a CPU with fp16 LSTMs", change=change
        )
        return


def tf32_off(case: ModelUnderTest) -> Iterator[Finding]:
    """fp32 products on a device with TF32, where TF32 is neither allowed nor ruled out."""
    callbacks: Any = case.argument("callbacks", ())
    callbacks = callbacks if isinstance(callbacks, (list, tuple)) else (callbacks,)
    decided = case.policy is not None and case.policy.tf32 is not None
    decided = decided or any(type(callback).__name__ == "EnableTF32" for callback in callbacks)
    if not case.device.tf32 or decided or torch.get_float32_matmul_precision() != "highest":
        return
    kinds = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, *conv1d())
    multiply = ((name, module) for name, module in case.modules if isinstance(module, kinds))
    found = [name for name, module in multiply if (case.pinned.get(id(module)) or case.compute) == "fp32"]
    if found:
        high = "set MixedPrecisionPlan(tf32='high')" if case.policy is not None else "add EnableTF32()"
        what = f"products in IEEE fp32 in {counted(len(found), 'module')} on {case.device.name}: {listed(found)}"
        yield fact("tf32_off", what, found[0], high=high)


def not_aligned(case: ModelUnderTest) -> Iterator[Finding]:
    """Linear layers, and a vocabulary, whose sizes are not multiples of a tensor core's tile."""
    compute = case.compute if case.fp8 is None else "fp8"
    multiples = _MULTIPLES if case.fp8 is None else {**_MULTIPLES, "fp8": case.fp8.multiple}
    multiple = multiples.get(compute, 1)
    odd: dict[str, tuple[int, int]] = {}
    for name, module in case.modules:
        sizes, step = _sizes(module), multiples.get(case.pinned.get(id(module)) or compute, 1)
        if any(size % step for size in sizes or ()):
            multiple, odd[name] = max(multiple, step), cast("tuple[int, int]", sizes)
    tables = {module.num_embeddings for _, module in case.modules if isinstance(module, nn.Embedding)}
    outputs = [out for _, out in odd.values() if out in tables and out > _SMALL_TABLE and out % multiple]
    weights = sum(inputs * out for inputs, out in odd.values())
    if not odd or (not outputs and weights < _SHARE * _multiplied(case)):
        return
    shapes = listed([f"{name or 'the model itself'} ({' x '.join(map(str, sizes))})" for name, sizes in odd.items()])
    words, change = "", f"round sizes up to multiples of {multiple}"
    if outputs:
        to = -(-outputs[-1] // multiple) * multiple
        words = f"; among them the vocabulary, {outputs[-1]}"
        more = f"; {change.replace('sizes', 'other sizes')}" if len(odd) > 1 else ""
        change = f"pad the vocabulary to {to}: model.resize_token_embeddings({to}), or vocab_size={to}{more}"
    what = f"sizes that are not multiples of {multiple}: {shapes}{words}"
    yield fact("dims_not_aligned", what, next(iter(odd)), compute=compute, change=change)


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a layer that multiplies."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return tuple(cast("Any", module).weight.shape) if isinstance(module, conv1d()) else None


def _multiplied(case: ModelUnderTest) -> int:
    """How many weights take part in products: all matrices, but for those that are only looked up."""
    lookups = {id(module.weight) for _, module in case.modules if isinstance(module, nn.Embedding)}
    lookups -= {id(module.weight) for _, module in case.modules if isinstance(module, nn.Linear)}
    return sum(p.numel() for _, _, p in case.parameters if p.ndim >= 2 and id(p) not in lookups)


# ---------------------------------------------------------------------- norms


def half_norms(case: ModelUnderTest) -> Iterator[Finding]:
    """Norms that would run in half precision, and epsilons of theirs that are 0 there."""
    found = list(_norms(case))
    kinds = list(dict.fromkeys(original_class(module).__name__ for _, module, _ in found))
    pins = pinning(kinds, under_plan=case.policy is not None)
    if found:
        why = f"{case.precision} stores and computes everything in half precision: sums lose bits"
        if any(case.pinned.get(id(module)) in HALF for _, module, _ in found):
            why = "a pin says so; sums over many numbers lose bits, and in fp16 squares above 65504 are infinite"
        name, _, dtype = found[0]
        what = f"{counted(len(found), 'norm')} ({', '.join(kinds)}) in {dtype}: {listed([name for name, *_ in found])}"
        yield fact("norm_in_half", what, name, why=why, pins=pins)
    small = [(name, eps) for name, module, dtype in found if (eps := _vanishing_eps(module, dtype)) is not None]
    if small:
        names, given = [name for name, _ in small], min(eps for _, eps in small)
        what = f"eps={given!r} is 0 in fp16, in {counted(len(small), 'norm')}: {listed(names)}"
        yield fact("eps_underflows:norm", what, names[0], pins=pins)


def _vanishing_eps(norm: nn.Module, dtype: str) -> float | None:
    """Its epsilon, if that is 0 in ``dtype``."""
    given = (getattr(norm, key, None) for key in ("eps", "variance_epsilon", "epsilon"))
    eps = next((value for value in given if isinstance(value, float)), 0.0)
    return eps if eps > 0 and torch.tensor(eps, dtype=to_torch(dtype)).item() == 0 else None


def _norms(case: ModelUnderTest) -> Iterator[tuple[str, nn.Module, str]]:
    """Every norm whose weights are, and sums would be, in half precision: its name and its dtype."""
    for name, module in case.modules:
        kind = original_class(module)
        if "norm" not in kind.__name__.lower() or next(module.children(), None) is not None:
            continue
        first, pin = next(iter(module.parameters(recurse=False)), None), case.pinned.get(id(module))
        stored = pin or case.storage or ("fp32" if first is None else case.stored(first))
        if stored in HALF and not _casts_itself(kind):  # with fp32 weights torch's kernels sum in fp32
            yield name, module, stored


def _casts_itself(kind: type[nn.Module]) -> bool:
    """Whether a norm of someone's own, as transformers' RMS norms, casts what it sums over to fp32."""
    if kind.forward.__module__.startswith("torch.nn."):
        return False
    try:
        return ".float()" in (source := getsource(kind.forward)) or "float32" in source
    except (OSError, TypeError):  # no source: compiled, or written in a shell
        return True


# ---------------------------------------------------------------------- activation checkpointing


class Block(NamedTuple):
    """A module that recomputes its activations; ``reentrant`` ones compute no gradients for inputs without them."""

    name: str
    module: nn.Module
    reentrant: bool
    by_transformers: bool


def no_input_gradients(case: ModelUnderTest) -> Iterator[Finding]:
    """Reentrant checkpointing of blocks whose inputs need no gradient (LoRA): nothing in them is trained.

    The plan's own checkpointing and every other non-reentrant one train as they should. Nothing is said where a hook
    may turn gradients on, or something trained may run before the blocks: in the transformers model that they are in,
    what is defined behind the last one does not.
    """
    blocks = [block for block in _blocks(case) if block.reentrant]
    within = {id(module) for block in blocks for module in block.module.modules()}
    trained = [(name, id(module) in within, module) for name, module, _ in case.trained]
    count, others = sum(inside for _, inside, _ in trained), [(n, m) for n, inside, m in trained if not inside]
    behind: set[int] = set()
    homes = [name for name, module in case.modules if hasattr(type(module), "get_input_embeddings")]
    home = next((name for name in homes if all(below(block.name, name) for block in blocks)), None)
    if blocks and home is not None:
        last = max(place for place, (_, module) in enumerate(case.modules) if id(module) in within)
        behind = {id(module) for name, module in case.modules[last + 1 :] if below(name, home)}
    within -= {id(block.module) for block in blocks}
    hooked = any(has_forward_hooks(module) for _, module in case.modules if id(module) not in within)
    if not count or hooked or any(id(module) not in behind for _, module in others):
        return
    kind = original_class(blocks[0].module).__name__
    what = f"reentrant checkpointing of {counted(len(blocks), 'block')} whose inputs require no gradient"
    yield fact(
        "lora_checkpoint_no_input_grads",
        f"{what}: {listed([block.name for block in blocks])}",
        blocks[0].name,
        weights=counted(count, "trained weight"),
        rest=f"only {others[0][0]} and what is behind do" if others else "nothing is left to train and backward raises",
        instead=f"checkpointing={kind!r}" if case.policy is not None else f"ActivationCheckpointing({kind!r})",
    )


def use_cache(case: ModelUnderTest) -> Iterator[Finding]:
    """A key-value cache that is filled again by every recomputation."""
    blocks = list(_blocks(case))
    by_plan = case.policy is not None and case.policy.checkpointing is not None
    for name, module in case.modules:
        model = cast("Any", module)
        if not hasattr(type(module), "can_generate") or not model.can_generate():
            continue
        mine = [block for block in blocks if below(block.name, name)]
        if getattr(model.config, "use_cache", False) is True and (mine or by_plan):
            wrong = any(block.reentrant and not block.by_transformers for block in mine)
            severity: Severity | None = "error" if wrong else None if mine else "info"  # the plan turns it off itself
            what = "config.use_cache is on while activations are recomputed"
            yield fact("use_cache_while_checkpointing", what, name, severity)


def _blocks(case: ModelUnderTest) -> Iterator[Block]:
    """What is checkpointed now, outermost torch wrappers and innermost transformers modules."""
    flagged = {
        name
        for name, module in case.modules
        if getattr(module, "gradient_checkpointing", False) is True
        and module.training
        and checkpointing_function(module) is not None
    }
    for name, module in case.modules:
        wrapped = reentrant(module)
        if wrapped is not None:
            yield Block(name, module, wrapped, by_transformers=False)
        elif name in flagged and not any(other != name and below(other, name) for other in flagged):
            keywords = getattr(checkpointing_function(module), "keywords", {})
            # a model's flag speaks for its layers
            lists = [(key, child) for key, child in module.named_children() if isinstance(child, nn.ModuleList)]
            layers = [(f"{key}.{at}", layer) for key, each in lists for at, layer in each.named_children()]
            for at, block in layers or [("", module)]:
                full = ".".join(filter(None, (name, at)))
                yield Block(full, block, keywords.get("use_reentrant") is not False, by_transformers=True)
