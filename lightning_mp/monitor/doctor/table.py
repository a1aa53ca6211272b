"""What every finding says: how severe it is, why it matters, and what to change. The checks return facts alone."""

from __future__ import annotations

from typing import Any, NamedTuple

from lightning_mp.monitor.events import Severity
from lightning_mp.monitor.findings import Finding


class Rule(NamedTuple):
    """One row: ``why`` and ``fix`` are filled with the words of the fact."""

    severity: Severity
    why: str
    fix: str


_LOAD = "load them in fp32: from_pretrained(..., dtype=torch.float32)"
_LOST = "{dtype} has {bits} bits of precision: an update below 2**-{bits} of its weight is lost"

#: by the finding's name, and behind a colon the case
RULES: dict[str, Rule] = {
    "no_fp32_masters:stock": Rule(
        "warning",
        f"{{precision}} updates them in place, without fp32 master weights; {_LOST}",
        f"{_LOAD}, or model.float() before training; a MixedPrecisionPlan('{{precision}}') stores them in fp32 itself",
    ),
    "no_fp32_masters:plan": Rule(
        "info",
        "the plan makes fp32 master weights from them, at twice the memory; they stay rounded to {dtype}",
        f"{_LOAD}, or model.float() before training",
    ),
    "no_fp32_masters:mode": Rule(
        "warning",
        f"there are no fp32 master weights; {_LOST}",
        "use '{mixed}', which keeps fp32 weights and computes in {dtype}",
    ),
    "no_fp32_masters:pin": Rule(
        "info",
        "they have no fp32 master weights: small updates are rounded away",
        "pin them to 'fp32', or remove the pin, unless this is intended",
    ),
    "fp16_params_under_scaler:stock": Rule(
        "error",
        "GradScaler raises 'Attempting to unscale FP16 gradients' on the first step",
        "load them in fp32, or train under MixedPrecisionPlan('16-mixed'), which stores them in fp32",
    ),
    "fp16_params_under_scaler:plan": Rule(
        "info", "torch's own GradScaler would refuse them; the plan stores them in fp32 first", _LOAD
    ),
    "eval_mode": Rule(
        "warning",
        "dropout, batch statistics and transformers' gradient checkpointing are off there; from_pretrained() returns "
        "models in eval mode, and Trainer.fit does not change it",
        "call {module}.train() where the model is made, or before fit",
    ),
    "lora_checkpoint_no_input_grads": Rule(
        "error",
        "{weights} in there get no gradient; {rest}",
        "call model.enable_input_require_grads(), or checkpoint with gradient_checkpointing_kwargs="
        "{{'use_reentrant': False}}, or call model.gradient_checkpointing_disable() and use {instead}",
    ),
    "use_cache_while_checkpointing": Rule(
        "warning",
        "keys and values of every layer are kept, much of the memory that checkpointing should save; a recomputation "
        "by torch's reentrant wrapper attends to them, and gradients are wrong",
        "set model.config.use_cache = False for training, and on again to generate",
    ),
    "bf16_emulated": Rule("warning", "{effect}", "use {instead} on this device, or precision='auto'"),
    "precision_refused": Rule("error", "the run is refused before its first step: it takes {needed}", "{change}"),
    "step_raises": Rule("error", "{place}: {line}", "mend it; a run prints the whole traceback"),
    "tf32_off": Rule(
        "info",
        "its tensor cores take fp32 products in TF32 (10 bits of mantissa, fp32's range), several times faster",
        "{high}, or torch.set_float32_matmul_precision('high'); 'highest' says that IEEE fp32 is intended",
    ),
    "dims_not_aligned": Rule(
        "info",
        "tensor cores multiply {compute} in tiles of 16 bytes; other sizes are padded or use slower kernels",
        "{change}",
    ),
    "tied_weights_conflicting_pins": Rule(
        "error", "a tied weight is one tensor and has one dtype; the run is refused before its first step", "{change}"
    ),
    "norm_in_half": Rule("warning", "{why}", "pin them: {pins}"),
    "eps_underflows:norm": Rule(
        "warning",
        "for equal inputs (padding) the variance is 0: the output divides by 0, or its gradient exceeds 65504",
        "set eps=1e-5, or pin them: {pins}",
    ),
    "eps_underflows:optimizer": Rule(
        "error",
        "wherever a gradient is 0, or its square is, the first step divides by 0: weights become NaN",
        "set {optimizer}(eps=1e-4) or fused=True, or store weights in fp32 with '16-mixed'",
    ),
    "scale_overflows_at_once": Rule(
        "warning", "a gradient of {gradient:.1g} overflows fp16 once scaled; {steps}", "use {scaling}"
    ),
    "accumulation_overflows": Rule(
        "warning",
        "{dtype} ends at {limit:g}: the sum overflows where a gradient is {entry:.3g} or more, although that of each "
        "micro-batch fits",
        "use {change}",
    ),
    "schedule_counts_skips": Rule(
        "warning",
        "the first steps in fp16 are often skipped: warm-up is cut short, and the schedule runs ahead",
        "use MixedPrecisionPlan('{precision}'), which holds schedules on a skipped step",
    ),
    "deepspeed_contradicts_trainer": Rule(
        "error", "the run is refused before its first step, or DeepSpeed silently uses that of the JSON", "{change}"
    ),
}


def fact(rule: str, what: str, where: str | None = None, severity: Severity | None = None, **words: Any) -> Finding:
    """The finding of the row ``rule``, of its severity unless another is given.

    ``words`` fill its texts; ``where`` is ``""`` for the model itself.
    """
    row = RULES[rule]
    return Finding(
        name=rule.partition(":")[0],
        severity=severity or row.severity,
        what=what,
        why=row.why.format(**words),
        fix=row.fix.format(**words),
        where=where or None,
    )
