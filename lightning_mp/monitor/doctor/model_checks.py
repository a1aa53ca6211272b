"""Checks of the model itself: its weights, modes, sizes, norms, and what it recomputes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from lightning_mp.compat.lightning import DeepSpeedStrategy, LightningModule
from lightning_mp.compat.torch import has_forward_hooks, is_compiled, is_loss, reentrant
from lightning_mp.compat.transformers import checkpointing_function, conv1d
from lightning_mp.errors import Faults
from lightning_mp.modules import fp8
from lightning_mp.modules.class_swap import original_class
from lightning_mp.monitor.advice import pinning
from lightning_mp.monitor.doctor.case import HALF, ModelUnderTest, below, listed, many
from lightning_mp.monitor.doctor.probe import reduces_in_half
from lightning_mp.monitor.doctor.table import fact
from lightning_mp.monitor.dtype_names import dtype_name
from lightning_mp.monitor.events import Severity
from lightning_mp.monitor.findings import Finding
from lightning_mp.numerics.dtypes import to_torch
from lightning_mp.policy import hardware

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
#: bits of the significand, the hidden one included
_BITS = {"bf16": 8, "fp16": 11}
#: 16 bytes, of what the product runs in: NVIDIA's "Deep Learning Performance Guide", matrix multiplication,
#: https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/ (table 1)
_MULTIPLES = {"fp16": 8, "bf16": 8, "fp8": 16}
#: below this part of the weights that are multiplied, odd sizes (a head with 10 classes) cost nothing worth naming
_SHARE = 0.1
#: a table as small as this holds segments or classes, no vocabulary
_SMALL_TABLE = 32
#: how transformers' language models that predict the next token end
_CAUSAL = ("ForCausalLM", "LMHeadModel")


# ---------------------------------------------------------------------- modes and weights


def eval_mode(case: ModelUnderTest) -> Iterator[Finding]:
    """Modules with trainable weights in eval mode, which Lightning has not changed since 2.2."""
    tops: dict[str, nn.Module] = {}
    for name, module in case.modules:
        if module.training or any(below(name, top) for top in tops):
            continue
        # A frozen part belongs in eval mode, and so may a norm whose statistics are to stay.
        alone = bool(name) and "norm" in type(module).__name__.lower() and next(module.children(), None) is None
        if not alone and any(parameter.requires_grad for parameter in module.parameters()):
            tops[name] = module
    if tops:
        first = next(iter(tops))
        root = "self" if isinstance(case.model, LightningModule) else "model"
        one = ".".join(filter(None, (root, first))) if len(tops) == 1 else "each"
        what = f"in eval mode with trainable weights: {listed(tops)}"
        yield fact("eval_mode", what, first, effect=_effect(list(tops.values())), module=one)


def _effect(tops: list[nn.Module]) -> str:
    modules = [module for top in tops for module in top.modules()]
    drops = sum(isinstance(module, _DROPOUTS) and module.p > 0 for module in modules)
    norms = sum(getattr(module, "running_mean", None) is not None for module in modules)
    said = [f"{many(drops, 'dropout')} without effect"] if drops else []
    said += [f"{many(norms, 'norm')} on running statistics that are not updated"] if norms else []
    return " and ".join(said) or "dropout, batch statistics and transformers' gradient checkpointing are off there"


def _lost(dtype: str) -> str:
    return f"{dtype} has {_BITS[dtype]} bits of precision: an update below 2**-{_BITS[dtype]} of its weight is lost"


def loaded_in_half(case: ModelUnderTest) -> Iterator[Finding]:
    """Trained weights that arrive in half precision although nothing asks for it."""
    if case.storage in HALF or (case.policy is None and case.storage is not None):
        return  # by the mode, or cast to what it stores
    loaded = ((name, dtype_name(p.dtype)) for name, _, p in case.trained if id(p) not in case.pinned)
    found = {name: dtype for name, dtype in loaded if dtype in HALF}
    if found:
        dtype = Counter(found.values()).most_common(1)[0][0]
        what = f"{many(len(found), 'trained weight')} in {dtype} under {case.precision}: {listed(found)}"
        rule = f"no_fp32_masters:{'stock' if case.policy is None else 'plan'}"
        yield fact(rule, what, next(iter(found)), precision=case.precision, dtype=dtype, lost=_lost(dtype))


def stored_in_half(case: ModelUnderTest) -> Iterator[Finding]:
    """Trained weights that the mode, or a pin, stores in half precision."""
    by_mode = [name for name, _, p in case.trained if case.storage in HALF and case.stored(p) in HALF]
    by_pin = [name for name, _, p in case.trained if case.pinned.get(id(p)) in HALF]
    if by_mode and case.storage is not None:
        mixed = case.precision.replace("true", "mixed") if case.precision.endswith("true") else "bf16-mixed"
        what = f"{case.precision} trains {many(len(by_mode), 'weight')}, stored in {case.storage} alone"
        yield fact("no_fp32_masters:mode", what, mixed=mixed, dtype=case.storage, lost=_lost(case.storage))
    elif by_pin:
        what = f"pins store {many(len(by_pin), 'trained weight')} in half precision: {listed(by_pin)}"
        yield fact("no_fp32_masters:pin", what, by_pin[0])


def fp16_under_a_scaler(case: ModelUnderTest) -> Iterator[Finding]:
    """Trained fp16 weights under torch's GradScaler, which refuses their gradients."""
    found = [name for name, _, p in case.trained if dtype_name(p.dtype) == "fp16" and id(p) not in case.pinned]
    sharded = isinstance(case.strategy, DeepSpeedStrategy) or "deepspeed" in str(case.strategy)
    if found and case.precision == "16-mixed" and (case.policy is not None or not sharded):
        what = f"{many(len(found), 'trained weight')} in fp16 under a loss scale: {listed(found)}"
        yield fact(f"fp16_params_under_scaler:{'stock' if case.policy is None else 'plan'}", what, found[0])


def tied_pins(case: ModelUnderTest) -> Iterator[Finding]:
    """A tied weight whose two names are pinned to different dtypes."""
    for fault in case.pin_faults.found:
        said, _, names = fault.given.partition(": ")
        if said == "contradicting pins on tied weights":
            what = f"tied weights are pinned to different dtypes: {names}"
            yield fact("tied_weights_conflicting_pins", what, names.partition(" ")[0], change=fault.fix)


# ---------------------------------------------------------------------- the device


def bf16_emulated(case: ModelUnderTest) -> Iterator[Finding]:
    """bf16 on a device that computes it in fp32, or not at all."""
    device, pins = case.device, () if case.policy is None else case.policy.pins
    where = [pin.pattern for pin in pins if pin.dtype == "bf16"]
    if device.bf16 == "native" or (case.compute != "bf16" and not where):
        return
    refused = hardware.refusal(device, case.precision) is not None
    effect = "the run is refused" if refused else "results are correct, but no faster than in fp32"
    severity: Severity | None = "error" if refused else "info" if device.type == "cpu" else None
    instead = "'16-mixed', with loss scaling" if device.fp16 and device.type != "cpu" else "'32-true'"
    says = "has no bf16" if device.bf16 == "none" else "computes bf16 in fp32 and rounds"
    pinned = f" with bf16 pins on {listed(where)}" if where else ""
    what = f"{device.name} {says}, under {case.precision}{pinned}"
    yield fact("bf16_emulated", what, severity=severity, effect=effect, instead=instead)


def tf32_off(case: ModelUnderTest) -> Iterator[Finding]:
    """fp32 products on a device with TF32, where TF32 is neither allowed nor ruled out."""
    tf32 = None if case.policy is None else case.policy.tf32
    callbacks: Any = case.argument("callbacks", ())
    callbacks = callbacks if isinstance(callbacks, (list, tuple)) else (callbacks,)
    named = any(type(callback).__name__ == "EnableTF32" for callback in callbacks)
    if not case.device.tf32 or tf32 is not None or named or torch.get_float32_matmul_precision() != "highest":
        return
    found = [name for name, module in case.modules if _multiplies_in_fp32(case, module)]
    if found:
        planned = "set MixedPrecisionPlan(tf32='high')", "tf32='highest'"
        high, highest = planned if case.policy is not None else ("add EnableTF32()", "EnableTF32('highest')")
        what = f"products in IEEE fp32 in {many(len(found), 'module')} on {case.device.name}: {listed(found)}"
        yield fact("tf32_off", what, found[0], high=high, highest=highest)


def _multiplies_in_fp32(case: ModelUnderTest, module: nn.Module) -> bool:
    if not isinstance(module, (nn.Linear, nn.Bilinear, nn.MultiheadAttention, *conv1d())):
        return False
    return (case.pinned.get(id(module)) or case.compute) == "fp32"


def not_aligned(case: ModelUnderTest) -> Iterator[Finding]:
    """Linear layers, and a vocabulary, whose sizes are not multiples of a tensor core's tile."""
    odd: dict[str, tuple[int, int]] = {}
    compute = "fp8" if case.policy is not None and case.policy.fp8 is not None else case.compute
    multiple = _MULTIPLES.get(compute, 1)
    vocabularies = {module.num_embeddings for _, module in case.modules if isinstance(module, nn.Embedding)}
    vocabulary: int | None = None
    for name, module in case.modules:
        sizes = _sizes(module)
        step = _MULTIPLES.get(case.pinned.get(id(module)) or compute, 1)
        if sizes is None or all(size % step == 0 for size in sizes):
            continue
        multiple = max(multiple, step)
        odd[name] = sizes
        if sizes[1] in vocabularies and sizes[1] > _SMALL_TABLE and sizes[1] % step:
            vocabulary = sizes[1]
    weights = sum(inputs * outputs for inputs, outputs in odd.values())
    if not odd or (vocabulary is None and weights < _SHARE * _multiplied(case)):
        return
    shapes = listed([f"{name or 'the model itself'} ({' x '.join(map(str, sizes))})" for name, sizes in odd.items()])
    words, change = "", f"round sizes up to multiples of {multiple}"
    if vocabulary is not None:
        to = -(-vocabulary // multiple) * multiple
        words = f"; among them the vocabulary, {vocabulary}"
        more = f"; round other sizes up to multiples of {multiple}" if len(odd) > 1 else ""
        change = f"pad the vocabulary to {to}: model.resize_token_embeddings({to}), or vocab_size={to}{more}"
    what = f"sizes that are not multiples of {multiple}: {shapes}{words}"
    yield fact("dims_not_aligned", what, next(iter(odd)), compute=compute, change=change)


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a layer that multiplies."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, conv1d()):
        weight = cast("Any", module).weight
        return int(weight.shape[0]), int(weight.shape[1])
    return None


def _multiplied(case: ModelUnderTest) -> int:
    """How many weights take part in products: all matrices, but for those that are only looked up."""
    lookups = {id(module.weight) for _, module in case.modules if isinstance(module, nn.Embedding)}
    lookups -= {id(module.weight) for _, module in case.modules if isinstance(module, nn.Linear)}
    return sum(p.numel() for _, _, p in case.parameters if p.ndim >= 2 and id(p) not in lookups)


# ---------------------------------------------------------------------- FP8


def fp8_converts_nothing(case: ModelUnderTest) -> Iterator[Finding]:
    """A model of which no layer can run in FP8: a run under the plan is refused."""
    faults = Faults()
    if case.fp8 is not None:
        pinned = [module for _, module in case.modules if id(module) in case.pinned]
        layers, chosen = fp8.select(case.model, case.fp8, pinned, faults)
        if not chosen:
            what = f"no layer can run in FP8: {'; '.join(fp8.table(layers)) or 'the model has no Linear'}"
            yield fact("fp8_converts_nothing", what, change=faults.found[-1].fix)


def fp8_not_compiled(case: ModelUnderTest) -> Iterator[Finding]:
    """FP8 on a GPU without ``torch.compile``."""
    compiles = getattr(getattr(case.strategy, "sharding", None), "compile", False)
    if case.fp8 is None or case.device.type != "cuda" or compiles:
        return
    if not any(is_compiled(module) or type(module).__name__ == "OptimizedModule" for _, module in case.modules):
        yield fact("fp8_not_compiled", "FP8 on a GPU without torch.compile")


def fp8_tensorwise_is_not_causal(case: ModelUnderTest) -> Iterator[Finding]:
    """One scale a tensor in a model of which each token is to see only those before it."""
    kinds = ((name, {cls.__name__ for cls in type(module).__mro__}) for name, module in case.modules)
    first = next((name for name, names in kinds if any(each.endswith(_CAUSAL) for each in names)), None)
    if case.fp8 is not None and case.fp8.recipe == "tensorwise" and first is not None:
        severity = None if case.fp8.evaluate == "fp8" else "info"
        yield fact("fp8_tensorwise_not_causal", "recipe='tensorwise' on a causal language model", first, severity)


# ---------------------------------------------------------------------- norms and losses


class HalfModule(NamedTuple):
    """A norm, or a loss, whose sums are over half-precision numbers."""

    name: str
    module: nn.Module
    dtype: str

    @property
    def kind(self) -> str:
        """The name of its class."""
        return original_class(self.module).__name__


def norm_in_half(case: ModelUnderTest) -> Iterator[Finding]:
    """Norms and losses that would run in half precision."""
    norms, losses = list(_half_norms(case)), list(_half_losses(case))
    found = norms + losses
    if not found:
        return
    kinds = list(dict.fromkeys(member.kind for member in found))
    counts = [many(len(each), what) for each, what in ((norms, "norm"), (losses, "loss module")) if each]
    names = listed([member.name for member in found])
    why = f"{case.precision} stores and computes everything in half precision: sums lose bits"
    if any(case.pinned.get(id(member.module)) in HALF for member in found):
        why = "a pin says so; sums over many numbers lose bits, and in fp16 squares above 65504 are infinite"
    elif case.mixed:
        why = "autocast runs no operation of theirs in fp32, and they do not cast their input themselves"
    what = f"{' and '.join(counts)} ({', '.join(kinds)}) in {found[0].dtype}: {names}"
    yield fact("norm_in_half", what, found[0].name, why=why, pins=_pinning(case, kinds))


def norm_eps_underflows(case: ModelUnderTest) -> Iterator[Finding]:
    """Norms in fp16 whose epsilon is 0 there."""
    found: dict[str, tuple[float, str]] = {}
    for member in _half_norms(case):
        given = (getattr(member.module, key, None) for key in ("eps", "variance_epsilon", "epsilon"))
        eps = next((value for value in given if isinstance(value, float)), 0.0)
        if eps > 0 and torch.tensor(eps, dtype=to_torch(member.dtype)).item() == 0:
            found[member.name] = eps, member.kind
    if found:
        eps = min(eps for eps, _ in found.values())
        what = f"eps={eps!r} is 0 in fp16, in {many(len(found), 'norm')}: {listed(found)}"
        pins = _pinning(case, dict.fromkeys(kind for _, kind in found.values()))
        yield fact("eps_underflows:norm", what, next(iter(found)), pins=pins)


def _pinning(case: ModelUnderTest, kinds: Any) -> str:
    return pinning(kinds, under_plan=case.policy is not None)


def _half_norms(case: ModelUnderTest) -> Iterator[HalfModule]:
    """Every norm that would run in half precision."""
    probed: dict[tuple[type[nn.Module], str, str], bool] = {}
    for name, module in case.modules:
        if "norm" not in original_class(module).__name__.lower() or next(module.children(), None) is not None:
            continue
        first = next(iter(module.parameters(recurse=False)), None)
        pin = case.pinned.get(id(module))
        stored = pin or case.storage or ("fp32" if first is None else case.stored(first))
        given = pin or (case.compute if case.mixed else stored)
        if given not in HALF:
            continue
        if original_class(module).forward.__module__.startswith("torch.nn."):
            if stored in HALF:  # with fp32 weights torch's kernels sum in fp32
                yield HalfModule(name, module, stored)
            continue
        key = original_class(module), stored, given
        if key not in probed:
            autocast = case.device.type if case.mixed and pin is None else None
            probed[key] = reduces_in_half(module, stored=stored, given=given, autocast=autocast)
        if probed[key]:
            yield HalfModule(name, module, given)


def _half_losses(case: ModelUnderTest) -> Iterator[HalfModule]:
    """Loss modules; autocast runs torch's losses in fp32, the true modes do not."""
    for name, module in case.modules:
        if is_loss(module):
            dtype = case.pinned.get(id(module)) or (case.storage if not case.mixed else None)
            if dtype in HALF:
                yield HalfModule(name, module, dtype)


# ---------------------------------------------------------------------- activation checkpointing


class Block(NamedTuple):
    """A module that recomputes its activations; ``reentrant`` ones compute no gradients for inputs without them."""

    name: str
    module: nn.Module
    reentrant: bool
    #: transformers does it, and turns caches off in the blocks that it checkpoints
    by_transformers: bool


def no_input_gradients(case: ModelUnderTest) -> Iterator[Finding]:
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
    kind = original_class(blocks[0].module).__name__
    what = f"reentrant checkpointing of {many(len(blocks), 'block')} whose inputs require no gradient"
    yield fact(
        "lora_checkpoint_no_input_grads",
        f"{what}: {listed([block.name for block in blocks])}",
        blocks[0].name,
        weights=many(len(trained), "trained weight"),
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
            kind = "transformers" if mine else "plan"
            if not all(block.by_transformers for block in mine):
                foreign = any(block.reentrant and not block.by_transformers for block in mine)
                kind = "reentrant" if foreign else "kept"
            what = "config.use_cache is on while activations are recomputed"
            yield fact(f"use_cache_while_checkpointing:{kind}", what, name)


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
            for at, block in _layers(name, module):
                yield Block(at, block, keywords.get("use_reentrant") is not False, by_transformers=True)


def _layers(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module itself; for a model whose flag speaks for its layers, these."""
    lists = [(key, child) for key, child in module.named_children() if isinstance(child, nn.ModuleList)]
    if not lists:
        yield name, module
    for key, layers in lists:
        yield from ((".".join(filter(None, (name, key, at))), layer) for at, layer in layers.named_children())


def _hooked(case: ModelUnderTest, blocks: list[Block]) -> bool:
    """Whether a hook outside the blocks may make their inputs require gradients."""
    within = {id(module) for block in blocks for module in block.module.modules()} - {id(b.module) for b in blocks}
    return any(has_forward_hooks(module) for _, module in case.modules if id(module) not in within)


def _behind(case: ModelUnderTest, blocks: list[Block]) -> set[int]:
    """Modules that run after the blocks for certain: in the same transformers model, and defined after the last."""
    names = [name for name, module in case.modules if hasattr(type(module), "get_input_embeddings")]
    home = next((name for name in names if all(below(block.name, name) for block in blocks)), None)
    if home is None:
        return set()
    last = max(at for at, (name, _) in enumerate(case.modules) if any(below(name, block.name) for block in blocks))
    return {id(module) for name, module in case.modules[last + 1 :] if below(name, home)}
