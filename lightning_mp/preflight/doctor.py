"""``doctor``: checks of a model and its training that find problems before the first step."""

import math
import re
from collections.abc import Iterator, Mapping
from inspect import getsource
from typing import Any, cast

import torch
from torch import nn

from lightning_mp.compat.lightning import DeepSpeedStrategy, LightningModule, is_overridden, parsed_optimizers
from lightning_mp.compat.transformers import conv1d
from lightning_mp.deepspeed.merge import add_trainer
from lightning_mp.errors import Faults, counted, pinning
from lightning_mp.modules import lstms
from lightning_mp.modules.patterns import original_class
from lightning_mp.numerics.dtypes import dtype_name, is_plain, to_torch
from lightning_mp.numerics.loss_scale import LossScaler
from lightning_mp.plan import for_strategy
from lightning_mp.plan.engine import EagerEngine
from lightning_mp.plan.side_run import untouched
from lightning_mp.policy.hardware import Device
from lightning_mp.policy.pieces import TORCH_INIT_SCALE
from lightning_mp.preflight.fit_checks import CHEAP, HALF, ModelUnderTest, case_of, listed, made
from lightning_mp.record.events import SEVERITIES
from lightning_mp.record.findings import Finding

#: bits of the significand, the hidden one included
_BITS = {"bf16": 8, "fp16": 11}
#: odd sizes in less than this share of the weights (a head with 10 classes) are not worth a finding
_SHARE = 0.1
#: an embedding of at most this many rows holds segments or classes, not a vocabulary
_SMALL_TABLE = 32
#: matches the name of a buffer of positions, or of its module's class
_POSITIONS = re.compile(
    "rotary|rope|inv_freq|freqs|sinusoid|timescale|theta|embed_positions|pos_e|positional|^pe$|cos_|sin_|^(cos|sin)$",
    re.IGNORECASE,
)
_EPSILONS = ("eps", "variance_epsilon", "epsilon")
FP16_MAX = 65504.0
#: up to this scale a gradient of 1/256 fits into fp16; the mean of 256 numbers has such gradients
HIGH_SCALE = 2.0**24


def half_weights(case: ModelUnderTest) -> Iterator[Finding]:
    """Yield findings about trained weights in half precision.

    A warning if they have no fp32 master weights, except pinned weights. An info if a plan makes
    master weights from them. An error if Lightning's GradScaler refuses fp16 weights; an info if a
    plan prevents that.
    """
    load = "load them in fp32: from_pretrained(..., dtype=torch.float32), or model.float() before training"
    stored = {name: case.stored(one) for name, one in case.trained.items() if id(one) not in case.pinned}
    half = [name for name, dtype in stored.items() if dtype in HALF]
    if half:
        dtype, mixed = stored[half[0]], case.precision.replace("true", "mixed")
        fix = load if case.storage is None else f"use '{mixed}', which keeps fp32 weights"
        what = f"{counted(len(half), 'trained weight')} in {dtype} alone under {case.precision}: {listed(half)}"
        lost = f"{dtype} has {_BITS[dtype]} bits of precision: an update below 2**-{_BITS[dtype]} of its weight"
        why = f"there are no fp32 master weights; {lost} is lost"
        yield Finding("no_fp32_masters", "warning", what, why, fix, half[0])
    planned = case.policy is not None
    loaded = {name: dtype_name(one.dtype) for name, one in case.trained.items() if dtype_name(one.dtype) in HALF}
    rounded = [name for name in loaded if planned and stored.get(name) == "fp32"]
    if rounded:
        what = f"{counted(len(rounded), 'trained weight')} loaded in half precision: {listed(rounded)}"
        why = "the plan makes fp32 master weights from them, at twice the memory; they stay rounded"
        yield Finding("no_fp32_masters", "info", what, why, load, rounded[0])
    fp16 = [name for name, dtype in loaded.items() if dtype == "fp16"]
    sharded = isinstance(case.strategy, DeepSpeedStrategy) or "deepspeed" in str(case.strategy)
    if fp16 and case.precision == "16-mixed" and (planned or not sharded):
        what = f"{counted(len(fp16), 'trained weight')} in fp16 under a loss scale: {listed(fp16)}"
        why = "GradScaler raises 'Attempting to unscale FP16 gradients' on the first step; a plan stores them in fp32"
        severity = "info" if planned else "error"
        yield Finding("fp16_params_under_scaler", severity, what, why, f"{load}, or use a plan", fp16[0])


def refused(case: ModelUnderTest) -> Iterator[Finding]:
    """Yield findings about formats that the device lacks, and about faults that a plan would raise.

    The plan's checks of the module names are left out if the model has a ``configure_model`` or
    ``setup`` of its own, because it may still lack modules.
    """
    policy, device, faults = case.policy, case.device, Faults()
    pins = [] if policy is None else [pin.pattern for pin in policy.pins if pin.dtype == "bf16"]
    needed, none = case.compute == "bf16" or bool(pins), device.bf16 == "none"
    # a CPU is for checking, so its speed is no finding
    if needed and device.bf16 != "native" and device.type != "cpu":
        says = "has no bf16" if none else "computes bf16 in fp32 and rounds"
        what = f"{device.name} {says}, under {case.precision}{f' with bf16 pins on {listed(pins)}' if pins else ''}"
        why = "the run is refused" if none else "results are correct, but no faster than in fp32"
        instead = "'16-mixed', with loss scaling" if device.fp16 else "'32-true'"
        fix = f"use {instead} on this device, or precision='auto'"
        yield Finding("bf16_emulated", "error" if none else "warning", what, why, fix)
    if policy is None:
        return
    if (device.type != "cuda" or device.capability is not None) and not (needed and none):
        for_strategy.check_device(policy, device, faults)
    here = torch.device(device.type if device.type == "cpu" else "meta")
    engine = EagerEngine(policy, device=here, scaler=LossScaler(), distributed=False)
    if not any(is_overridden(name, case.model, LightningModule) for name in ("configure_model", "setup")):
        engine.check(case.model, faults)  # those hooks may still add modules that a pattern names
    if engine.lstms:
        name = next(iter(engine.lstms))
        why = "the run is refused when it is called; oneDNN has no such kernel, except for packed inputs"
        yield Finding("precision_refused", "warning", lstms.problem(name, case.compute), why, lstms.FIX, name)
    for fault in faults.found:
        why = f"the run is refused before its first step{': it takes ' * bool(fault.allowed)}{fault.allowed}"
        said, _, names = fault.problem.partition(": ")
        tied = said == "contradicting pins on tied weights"
        name = "tied_weights_conflicting_pins" if tied else "precision_refused"
        yield Finding(name, "error", fault.problem, why, fault.fix, names.partition(" ")[0] if tied else None)


def tf32_off(case: ModelUnderTest) -> Iterator[Finding]:
    """Yield an info about fp32 products on a device with TF32.

    Nothing is found if torch allows TF32 already, the plan sets ``tf32`` to any value, or the
    Trainer has an EnableTF32 callback.
    """
    callbacks: Any = case.trainer.get("callbacks") or ()
    callbacks = callbacks if isinstance(callbacks, (list, tuple)) else (callbacks,)
    decided = case.policy is not None and case.policy.tf32 is not None
    decided = decided or any(type(callback).__name__ == "EnableTF32" for callback in callbacks)
    if not case.device.tf32 or decided or torch.get_float32_matmul_precision() != "highest":
        return
    kinds = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, *conv1d())
    multiply = {name: case.pinned.get(id(module)) for name, module in case.modules if isinstance(module, kinds)}
    full = [name for name, pin in multiply.items() if (pin or case.compute) == "fp32"]
    if full:
        what = f"products in IEEE fp32 in {counted(len(full), 'module')} on {case.device.name}: {listed(full)}"
        why = "its tensor cores take fp32 products in TF32 (10 bits of mantissa, fp32's range), several times faster"
        high = "set MixedPrecisionPlan(tf32='high')" if case.policy is not None else "add EnableTF32()"
        fix = f"{high}, or torch.set_float32_matmul_precision('high'); 'highest' says that IEEE fp32 is intended"
        yield Finding("tf32_off", "info", what, why, fix, full[0])


def not_aligned(case: ModelUnderTest) -> Iterator[Finding]:
    """Yield an info about linear layers and a vocabulary that do not fill a tensor core's tiles.

    Layers other than the vocabulary's count only if they hold a tenth of the weights together.
    """
    fp8 = None if case.policy is None else case.policy.fp8
    compute = case.compute if fp8 is None else "fp8"
    # 16 bytes of the product's format: NVIDIA's "Deep Learning Performance Guide", matrix multiplication,
    # https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/ (table 1)
    multiples = {"fp16": 8, "bf16": 8, "fp8": 16 if fp8 is None else fp8.multiple}
    multiple = multiples.get(compute, 1)
    odd: dict[str, tuple[int, ...]] = {}
    for name, module in case.modules:
        if isinstance(module, (nn.Linear, *conv1d())):  # (in, out)
            weight = tuple(cast("Any", module).weight.shape)
            sizes = (module.in_features, module.out_features) if isinstance(module, nn.Linear) else weight
            step = multiples.get(case.pinned.get(id(module)) or compute, 1)
            if any(size % step for size in sizes):
                multiple, odd[name] = max(multiple, step), sizes
    tables = {module.num_embeddings for _, module in case.modules if isinstance(module, nn.Embedding)}
    outputs = [out for _, out in odd.values() if out in tables and out > _SMALL_TABLE and out % multiple]
    weights = sum(inputs * out for inputs, out in odd.values())
    if not odd or (not outputs and weights < _SHARE * sum(parameter.numel() for parameter in case.parameters.values())):
        return
    shapes = listed([f"{name or 'the model itself'} ({' x '.join(map(str, sizes))})" for name, sizes in odd.items()])
    what, fix = f"sizes that are not multiples of {multiple}: {shapes}", f"round sizes up to multiples of {multiple}"
    if outputs:
        to = -(-outputs[-1] // multiple) * multiple
        what += f"; among them the vocabulary, {outputs[-1]}"
        fix = f"pad the vocabulary to {to}: model.resize_token_embeddings({to}), or vocab_size={to}; else {fix}"
    why = f"tensor cores multiply {compute} in tiles of 16 bytes; other sizes are padded or use slower kernels"
    yield Finding("dims_not_aligned", "info", what, why, fix, next(iter(odd)))


def half_norms(case: ModelUnderTest) -> Iterator[Finding]:
    """Yield warnings about norms that sum in half precision, and about their epsilons that become 0.

    A norm that casts to fp32 in its own forward is left out.
    """
    norms: dict[str, tuple[nn.Module, str]] = {}
    for name, module in case.modules:
        kind = original_class(module)
        if "norm" in kind.__name__.lower() and next(module.children(), None) is None:
            first, pin = next(iter(module.parameters(recurse=False)), None), case.pinned.get(id(module))
            stored = pin or case.storage or ("fp32" if first is None else case.stored(first))
            # with fp32 weights torch's kernels sum in fp32
            if stored in HALF and not _casts_itself(kind):
                norms[name] = module, stored
    if not norms:
        return
    kinds = list(dict.fromkeys(original_class(module).__name__ for module, _ in norms.values()))
    first_name, (_, first_dtype) = next(iter(norms.items()))
    fix = f"pin them: {pinning(kinds, under_plan=case.policy is not None)}"
    why = "the mode, or a pin, has them there: sums lose bits, and in fp16 squares above 65504 are infinite"
    what = f"{counted(len(norms), 'norm')} ({', '.join(kinds)}) in {first_dtype}: {listed(norms)}"
    yield Finding("norm_in_half", "warning", what, why, fix, first_name)
    given = [(name, getattr(module, eps, None), dtype) for name, (module, dtype) in norms.items() for eps in _EPSILONS]
    small = {name: eps for name, eps, dtype in given if isinstance(eps, float) and _vanishes(eps, dtype)}
    if small:
        what = f"eps={min(small.values())!r} is 0 in fp16, in {counted(len(small), 'norm')}: {listed(small)}"
        why = "for equal inputs (padding) the variance is 0: the output divides by 0, or its gradient exceeds 65504"
        yield Finding("eps_underflows", "warning", what, why, f"set eps=1e-5, or {fix}", next(iter(small)))


def positions_rounded(case: ModelUnderTest) -> Iterator[Finding]:
    """Yield a warning about buffers of positions (rotary frequencies) that a half buffer dtype rounds.

    Buffers are left out if a pin or the model itself keeps them in fp32, or if the dtype holds them
    exactly.
    """
    policy = case.policy
    stored = case.storage if policy is None else (policy.buffer_dtype or case.storage)
    if stored not in HALF:
        return
    dtype, rounded, kinds = to_torch(stored), list[str](), list[str]()
    for name, module in case.modules:
        kind = original_class(module).__name__
        for key, buffer in module.named_buffers(recurse=False):
            kept = case.pinned.get(id(buffer)) == "fp32" or case.pinned.get(id(module)) == "fp32"
            if kept or not is_plain(buffer) or not (_POSITIONS.search(key) or _POSITIONS.search(kind)):
                continue
            if buffer.is_meta or not torch.equal(buffer, buffer.to(dtype).to(buffer.dtype)):
                rounded.append(f"{name}.{key}".strip("."))
                kinds.append(kind)
    if rounded:
        fix = f"pin them: {pinning(dict.fromkeys(kinds), under_plan=policy is not None)}"
        if policy is not None:
            fix += "; or write buffer_dtype='fp32', for all buffers"
        what = f"{counted(len(rounded), 'buffer')} of positions rounded to {stored}: {listed(rounded)}"
        why = "an angle is a frequency times the position: its error grows with the length of the text"
        yield Finding("positions_rounded", "warning", what, why, fix, rounded[0])


def _vanishes(eps: float, dtype: str) -> bool:
    return eps > 0 and torch.tensor(eps, dtype=to_torch(dtype)).item() == 0


def _casts_itself(kind: type[nn.Module]) -> bool:
    """True if a norm's own forward casts its input to fp32, like transformers' RMS norms.

    The source decides. A class without source counts as casting.
    """
    if kind.forward.__module__.startswith("torch.nn."):
        return False
    try:
        return ".float()" in (source := getsource(kind.forward)) or "float32" in source
    except (OSError, TypeError):  # there is no source: compiled, or typed in a shell
        return True


def scale_overflows_at_once(case: ModelUnderTest) -> Iterator[Finding]:
    """Yield a finding if nearly every gradient overflows at the initial loss scale.

    It is an error if the scale's floor is as high, because then every step is skipped.
    """
    rule = case.scaling
    if rule is None or rule.init_scale <= HIGH_SCALE:
        return
    stays = rule.floor > HIGH_SCALE
    steps = (
        f"the scale stays above {rule.floor:g}: such steps are skipped forever"
        if stays
        else "each halving costs a step"
    )
    why = f"a gradient of {FP16_MAX / rule.init_scale:.1g} overflows fp16 once scaled, and {steps}"
    what = f"the loss scale starts at {rule.init_scale:g}"
    fix = f"use a dynamic scale that starts at {TORCH_INIT_SCALE:g}: init_scale={TORCH_INIT_SCALE!r}"
    severity = "error" if stays else "warning"
    yield Finding("scale_overflows_at_once", severity, what, why, fix, "loss_scaling.init_scale")


def accumulation_overflows(case: ModelUnderTest) -> Iterator[Finding]:
    """Yield a warning if scaled fp16 gradients fit, but their sum over micro-batches may overflow."""
    rule, parts = case.scaling, int(case.trainer.get("accumulate_grad_batches") or 1)
    half = any(case.stored(parameter) == "fp16" for parameter in case.trained.values())
    if rule is None or parts <= 1 or not half or rule.init_scale < FP16_MAX:
        return
    what = f"{parts} micro-batches are summed in fp16 at a loss scale of {rule.init_scale:g}"
    overflows = f"the sum overflows where a gradient is {FP16_MAX / rule.init_scale:.3g} or more"
    why = f"fp16 ends at {FP16_MAX:g}: {overflows}, although that of each micro-batch fits"
    # the power of 2 that keeps the sum a factor of 16 below the limit
    scale = 2.0 ** (math.floor(math.log2(FP16_MAX / parts)) - 4)
    fix = f"set init_scale={scale!r}, or use 16-mixed, whose gradients are fp32"
    yield Finding("accumulation_overflows", "warning", what, why, fix, "accumulate_grad_batches")


def optimizer_eps_underflows(case: ModelUnderTest) -> Iterator[Finding]:
    """Yield an error for each optimizer whose ``eps`` becomes 0 in fp16 state.

    Fused optimizers are left out, because they compute in fp32.
    """
    if not any(case.stored(parameter) == "fp16" for parameter in case.trained.values()):
        return
    for optimizer in _configured(case)[0]:
        groups = [group for group in optimizer.param_groups if not group.get("fused")]
        given = [g.get("eps") for g in groups if any(case.stored(parameter) == "fp16" for parameter in g["params"])]
        eps = [value for value in given if isinstance(value, float) and _vanishes(value, "fp16")]
        if eps:
            name = type(optimizer).__name__
            what = f"{name}(eps={min(eps)!r}) with weights and state in fp16, where that is 0"
            why = "wherever a gradient is 0, or its square is, the first step divides by 0: weights become NaN"
            fix = f"set {name}(eps=1e-4) or fused=True, or store weights in fp32 with '16-mixed'"
            yield Finding("eps_underflows", "error", what, why, fix, "configure_optimizers")


def schedule_counts_skips(case: ModelUnderTest) -> Iterator[Finding]:
    """Yield a warning about schedules that advance on skipped steps, under Lightning's own scaler.

    A plan holds its schedules on a skipped step.
    """
    if case.scaling is None or case.policy is not None:
        return
    names = [type(schedule.scheduler).__name__ for schedule in _configured(case)[1] if schedule.interval == "step"]
    if names:
        what = f"{', '.join(names)} advances at every step, including those that the loss scaler skips"
        why = "the first steps in fp16 are often skipped: warm-up is cut short, and the schedule runs ahead"
        fix = f"use MixedPrecisionPlan('{case.precision}'), which holds schedules on a skipped step"
        yield Finding("schedule_counts_skips", "warning", what, why, fix, "configure_optimizers")


def _configured(case: ModelUnderTest) -> tuple[list[Any], list[Any]]:
    """Return the optimizers and the schedules with their intervals.

    The user's ``optimizer`` comes first, else ``configure_optimizers`` is called. Its effects on
    the model are undone, except on the values of parameters. Both lists are empty without either.
    """
    given = case.optimizer
    if given is None and isinstance(case.model, LightningModule):
        with untouched(case.model, torch.device("cpu")):
            given = case.model.configure_optimizers()
    return ([], []) if given is None else parsed_optimizers(given)


def deepspeed_contradicts_trainer(case: ModelUnderTest) -> Iterator[Finding]:
    """Yield an error for each key of the DeepSpeed JSON that contradicts the precision or the Trainer."""
    own, trainer, faults = case.strategy, case.trainer, Faults()
    stock = DeepSpeedStrategy in type(own).__mro__
    given = (own._given or {}) if stock and hasattr(own, "plan_engine") else own.config if stock else own
    if not isinstance(given, Mapping):
        return
    json = cast("Mapping[str, Any]", given)
    for block in HALF:
        if (json.get(block) or {}).get("enabled") is True and case.compute != block:
            both = f"{block}.enabled=True in the JSON and precision={case.precision!r}"
            faults.add(both, fix=f"set {block}.enabled to false, or train in it")
    if trainer:
        devices, nodes = (trainer.get("devices") or "auto"), (trainer.get("num_nodes") or 1)
        world = devices * nodes if isinstance(devices, int) and devices > 0 else None
        # the whole batch can only be checked with a known number of devices
        config = {key: value for key, value in json.items() if world is not None or key != "train_batch_size"}
        clip = trainer.get("gradient_clip_val") if trainer.get("gradient_clip_algorithm") in (None, "norm") else None
        accumulate = int(trainer.get("accumulate_grad_batches") or 1)
        add_trainer(config, faults, clip_norm=clip, accumulate=accumulate, world_size=world or 1)
    why = "the run is refused before its first step, or DeepSpeed silently uses that of the JSON"
    for fault in faults.found:
        where = fault.problem.partition("=")[0]
        yield Finding("deepspeed_contradicts_trainer", "error", fault.problem, why, fault.fix, where)


CHECKS = (
    *(*CHEAP, half_weights, refused, tf32_off, not_aligned, half_norms, positions_rounded),
    *(scale_overflows_at_once, accumulation_overflows, optimizer_eps_underflows, schedule_counts_skips),
    deepspeed_contradicts_trainer,
)


def doctor(
    model: nn.Module,
    plan: Any = None,
    strategy: Any = None,
    trainer_args: Mapping[str, Any] | None = None,
    *,
    optimizer: Any = None,
    device: Device | None = None,
) -> list[Finding]:
    """Return findings about the training of ``model``, most severe first. A healthy run has none.

    The model's parameters, gradients, buffers, training mode and hooks are unchanged, and so are
    random numbers. A check that fails with an exception is skipped. The logger
    ``lightning_mp.preflight.fit_checks`` notes it at level INFO.

    Args:
        model: a LightningModule, or any module.
        plan: a MixedPrecisionPlan, its policy, or a mapping of its fields. It may also be one of
            Lightning's own precisions (``"16-mixed"``) or precision plugins. ``None`` takes the
            plugin or the precision of ``trainer_args``.
        strategy: a strategy, its name, or a DeepSpeed JSON as a mapping. ``None`` takes the one of
            ``trainer_args``.
        trainer_args: the Trainer's arguments, such as ``accelerator``, ``accumulate_grad_batches``
            and ``gradient_clip_val``.
        optimizer: the result of ``configure_optimizers``, for a model that cannot call it without a
            Trainer.
        device: the device of the run. ``None`` takes the device that ``trainer_args`` chooses on
            this machine.

    Raises:
        PlanError: ``model`` is no module or belongs to the other copy of Lightning, or ``plan`` is
            no plan. All faults of a mapping are reported together.
    """
    case = case_of(model, plan, strategy, trainer_args or {}, device, optimizer=optimizer)
    findings = [finding for check in CHECKS for finding in made(check, case)]
    return sorted(findings, key=lambda finding: (-SEVERITIES.index(finding.severity), finding.code))
