"""A policy from a DeepSpeed JSON: what it says of formats and of the loss scale, and a note on every other key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from os import PathLike
from typing import Any, cast

from lightning_mp.deepspeed_config import schema as keys
from lightning_mp.deepspeed_config.merge import SUBJECT, read
from lightning_mp.deepspeed_config.notes import DeepSpeedNotes, left_to_others
from lightning_mp.errors import Faults, PlanError
from lightning_mp.policy import NonFinite, PrecisionPolicy
from lightning_mp.policy.loss_scaling import FP32_MAX, LossScaling

#: DeepSpeed's defaults (precision_config.DeepSpeedFP16Config), and the field of LossScaling that each key says
_RULE: Mapping[str, tuple[Any, str]] = {
    "initial_scale_power": (16, "init_scale"),
    "loss_scale_window": (1000, "growth_interval"),
    "hysteresis": (2, "hysteresis"),
    "consecutive_hysteresis": (False, "consecutive_hysteresis"),
    "min_loss_scale": (1, "min_scale"),
}
_MODES = {"fp16": "16-mixed", "bf16": "bf16-mixed"}
_BLOCKS = ("fp16", "bf16", "bfloat16", "torch_autocast", "data_types")
_SENT = "communication_data_type"
_STRAY = {key for name in _BLOCKS for key in keys.BLOCKS[name]} - {"enabled", "dtype"}
_FORMATS = ("amp", "fp8", "quantize_training", "compression_training")


def read_policy(
    source: Mapping[str, Any] | str | PathLike[str],
) -> tuple[PrecisionPolicy, DeepSpeedNotes]:
    """The policy that a DeepSpeed JSON asks for (a mapping, a ``DictConfig`` or a path), and what became of its keys.

    Raises:
        PlanError: no JSON object; an unknown key or a wrong value where formats or the loss scale are decided, two
            formats at once, one that a plan cannot carry out, an ``"auto"`` that nothing resolves; all together.
    """
    reading = _Reading(read(source))
    return reading.policy(), reading.notes


class _Reading:
    """One JSON on its way to a policy; what is wrong is collected in ``faults``."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.faults = Faults(SUBJECT)
        self.taken: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.notes = DeepSpeedNotes(self.taken, self.left, self.refused)
        self.config = config
        self.bf16 = "bf16" if _given(config.get("bf16")) or "bfloat16" not in config else "bfloat16"
        self.blocks = {name: self._block(name) for name in _BLOCKS}

    def policy(self) -> PrecisionPolicy:
        for key, value in self.config.items():
            self._top(str(key), value)
        precision = self._precision()
        for name in ("fp16", self.bf16, "torch_autocast"):
            self._switch(name, precision)
        fields: dict[str, Any] = {
            "precision": precision,
            "loss_scaling": self._loss_scaling(precision),
            "nonfinite": self._nonfinite(precision),
            "reduce_dtype": self._reduce_dtype(),
            "buffer_dtype": self._data_types(precision),
        }
        self._masters("fp16", ("fp16_master_weights_and_grads",), "16-true")
        self._masters(self.bf16, ("bf16_master_weights_and_grads", "bf16_optimizer_states"), "bf16-true")
        self._rest()
        self.faults.raise_if_any()
        return PrecisionPolicy(**fields)

    # --- the keys of the file ---------------------------------------------------------------------------------------

    def _top(self, key: str, value: Any) -> None:
        deciding = (*_BLOCKS, _SENT)
        if key in deciding:
            return
        near = difflib.get_close_matches(key.lower(), deciding, n=1, cutoff=0.7)
        if key in keys.REFUSED:
            self._removed(key, value)
        elif key not in keys.TOP and (near or key in _STRAY):
            keys.known("", {key: value}, self.faults)  # it was meant to decide a format: refused with the right name
        else:
            left_to_others(key, value, self.notes)

    def _removed(self, key: str, value: Any) -> None:
        if not value or (isinstance(value, Mapping) and cast("Any", value).get("enabled") is False):
            self.left[key] = "it is off"
        elif key in _FORMATS:
            fix = f"remove {key} from the JSON; fp16.enabled or bf16.enabled says what computes"
            self.faults.add(f"{key}={value!r}", f"no {key}: {keys.REFUSED[key]}", fix)
        else:
            self.refused[key] = keys.REFUSED[key]

    def _block(self, name: str) -> dict[str, Any]:
        """A block's well-formed entries; ``"auto"`` and ``null`` stay as they are."""
        block = self.config.get(name)
        if block is None:
            self.left.update({name: "null: not given"} if name in self.config else {})
            return {}
        if name in ("bf16", "bfloat16") and name != self.bf16:
            self.refused[name] = f"DeepSpeed reads {self.bf16} where both stand: remove one"
            return {}
        if not keys.known("", {name: block}, self.faults):
            return {}
        comments = {str(key) for key in block if str(key).startswith("_")}
        self.left.update({f"{name}.{key}": "a comment" for key in comments})
        entries = {str(key): value for key, value in block.items() if str(key) not in comments}
        self.left.update({} if entries or comments else {name: "empty: nothing is said"})
        unsaid = {key: value for key, value in entries.items() if not _given(value)}
        keys.known(name, {key: value for key, value in unsaid.items() if key not in keys.BLOCKS[name]}, self.faults)
        return unsaid | keys.known(name, {key: entries[key] for key in entries if key not in unsaid}, self.faults)

    def _rest(self) -> None:
        """A note on every entry of the blocks that has none yet."""
        reasons = {"fp16.auto_cast": "the engine casts floating inputs to fp16; under a plan autocast does"}
        seen = self.taken.keys() | self.left.keys() | self.refused.keys()
        for name, block in self.blocks.items():
            off = name != "data_types" and block.get("enabled") not in (True, "auto")
            for where in (f"{name}.{key}" for key in block):
                if where not in seen:
                    self.left[where] = f"{name} is off" if off else reasons.get(where, "the engine's own")

    # --- who computes in which format -------------------------------------------------------------------------------

    def _precision(self) -> str:
        on = {
            f"{name}.enabled=True": dtype
            for name, dtype in (("fp16", "fp16"), (self.bf16, "bf16"))
            if self.blocks[name].get("enabled") is True
        }
        on |= self._autocast()
        if len(set(on.values())) > 1:
            fix = "set enabled to false in all but one"
            self.faults.add(" and ".join(on), "one format to compute in", fix)
        if on:
            return _MODES[next(iter(on.values()))]
        pair = {name: self.blocks[name].get("enabled") for name in ("fp16", self.bf16)}
        if "auto" not in pair.values():
            return "32-true"
        for name in [name for name, value in pair.items() if value is False]:
            (other,) = set(pair) - {name}
            mode = _MODES["fp16" if other == "fp16" else "bf16"]
            self.faults.add(
                f"{other}.enabled='auto' with {name}.enabled=False",
                f"true or false: nothing here fills it in, and a plan of precision 'auto' may choose {name}",
                f"write {other}.enabled: true for {mode!r}, false for '32-true'",
            )
        return "auto"

    def _autocast(self) -> dict[str, str]:
        block = self.blocks["torch_autocast"]
        enabled, dtype = block.get("enabled"), keys.dtype_of(block.get("dtype"))
        if enabled == "auto":
            fix = "write true or false"
            self.faults.add("torch_autocast.enabled='auto'", "true, false: nothing fills this 'auto' in", fix)
        if enabled is not True:
            return {}
        if block.get("lower_precision_safe_modules") is not None:
            given, fix = "torch_autocast.lower_precision_safe_modules", "remove it; pins={pattern: dtype} says the same"
            self.faults.add(given, "torch_autocast without it: the plan enters PyTorch's own autocast", fix)
        if dtype not in _MODES:
            said = f"dtype={block['dtype']!r}" if "dtype" in block else "no dtype"
            self.faults.add(f"torch_autocast.enabled=True with {said}", "bf16, fp16", "write the dtype")
            return {}
        self.taken["torch_autocast.dtype"] = f"precision={_MODES[dtype]!r}"
        return {f"torch_autocast.enabled=True with dtype={block['dtype']!r}": dtype}

    def _switch(self, name: str, precision: str) -> None:
        block = self.blocks[name]
        if "enabled" not in block:
            return
        value = block["enabled"]
        stored = "weights stored in fp32, as DeepSpeed's masters are, and cast where they are used"
        said: dict[Any, str] = {
            True: f"precision={precision!r}: {stored}",
            False: "off",
            None: "null: off, DeepSpeed's default",
            "auto": "'auto': off, since another block decides",
        }
        if value == "auto" and precision == "auto":
            said["auto"] = "'auto': precision='auto' chooses by device and model; write true or false to decide"
        self.taken[f"{name}.enabled"] = said[value]

    def _masters(self, name: str, refused: tuple[str, ...], instead: str) -> None:
        for key in refused:
            if self.blocks[name].get(key) is True:
                allowed = f"{name} without it: the plan stores fp32 weights, gradients and optimizer state"
                fix = f"remove {name}.{key}, or write MixedPrecisionPlan({instead!r}), which stores half weights"
                self.faults.add(f"{name}.{key}=True", allowed, fix)

    # --- the loss scale ---------------------------------------------------------------------------------------------

    def _loss_scaling(self, precision: str) -> LossScaling | None:
        block = self.blocks["fp16"]
        if precision == "16-mixed" and block.get("enabled") is not True:
            return LossScaling.torch()  # DeepSpeed's torch_autocast in fp16 scales with a torch.amp.GradScaler
        if precision not in ("16-mixed", "auto"):
            return None
        scale = self._number("loss_scale", 0)
        if "loss_scale" in block:
            what = f"LossScaling.static({scale!r})" if scale else "dynamic loss scaling"
            self.taken["fp16.loss_scale"] = f"{_unsaid(block['loss_scale'], 0)}{what}"
        if scale:
            unused = "the scale is static, and DeepSpeed reads none of the rule"
            self.left.update({f"fp16.{key}": unused for key in _RULE if key in block})
            return None if scale > FP32_MAX else self._built(loss_scale=scale)
        rule = self._built(**{key: self._number(key, default) for key, (default, _) in _RULE.items()})
        for key, (default, field) in _RULE.items():
            if key in block and rule is not None:
                self.taken[f"fp16.{key}"] = (
                    f"{_unsaid(block[key], default)}loss_scaling.{field}={getattr(rule, field)!r}"
                )
        return rule

    def _number(self, key: str, default: Any) -> Any:
        value: Any = self.blocks["fp16"].get(key)
        if not _given(value):
            return default
        if key in ("loss_scale", "min_loss_scale") and value > FP32_MAX:
            self.faults.add(f"fp16.{key}={value!r}", "a number that fp32 can hold", "correct it")
            return FP32_MAX
        whole = isinstance(value, float) and key != "loss_scale" and value.is_integer()
        return int(value) if whole else value

    def _built(self, **words: Any) -> LossScaling | None:
        try:
            return LossScaling.deepspeed(**words)
        except PlanError as error:
            for fault in error.faults:
                self.faults.add(f"fp16: {fault.given}", fault.allowed, fault.fix)
        return None

    # --- the rest of the numbers ------------------------------------------------------------------------------------

    def _nonfinite(self, precision: str) -> NonFinite:
        block = self.blocks[self.bf16]
        check = block.get("check_grad_overflow")
        if precision not in ("bf16-mixed", "auto") or block.get("enabled") not in (True, "auto") or not _given(check):
            return NonFinite()
        action = "skip" if check else "ignore"
        where = "" if check else "; the mp_deepspeed strategies refuse that, mp_ddp and mp_fsdp2 carry it out"
        self.taken[f"{self.bf16}.check_grad_overflow"] = f"nonfinite={action!r}{where}"
        return NonFinite(action=action)

    def _reduce_dtype(self) -> str:
        value = self.config.get(_SENT)
        if not _given(value):
            self.left.update({_SENT: f"{value!r}: not given, the plan sums in fp32"} if _SENT in self.config else {})
            return "fp32"
        dtype = keys.dtype_of(keys.known("", {_SENT: value}, self.faults).get(_SENT)) or "fp32"
        self.taken[_SENT] = f"reduce_dtype={dtype!r}"
        return dtype

    def _data_types(self, precision: str) -> str | None:
        block = {key: keys.dtype_of(value) for key, value in self.blocks["data_types"].items() if _given(value)}
        summed, stored, buffers = (block.get(f"{name}_dtype") for name in ("grad_accum", "param", "buffer"))
        if summed is not None:
            self.taken["data_types.grad_accum_dtype"] = "gradients are summed over micro-batches in fp32"
        if summed not in (None, "fp32"):
            fix = "remove data_types.grad_accum_dtype from the JSON"
            self.faults.add(f"data_types.grad_accum_dtype={summed!r}", "fp32, in which a plan sums them", fix)
        if stored is not None:
            self.left["data_types.param_dtype"] = "the engine's copy; a plan stores fp32 and casts where it computes"
        halves = [name for name in ("fp16", self.bf16) if self.blocks[name].get("enabled") is True]
        computed = stored if precision == "auto" else keys.dtype_of(halves[0]) if halves else "fp32"
        if stored is not None and stored != computed:
            fix = "remove data_types.param_dtype from the JSON"
            self.faults.add(f"data_types.param_dtype={stored!r}", f"{computed}, as the JSON's engine computes", fix)
        if buffers is not None:
            self.taken["data_types.buffer_dtype"] = f"buffer_dtype={buffers!r}"
        return buffers


def _given(value: Any) -> bool:
    return value is not None and not (isinstance(value, str) and value == "auto")


def _unsaid(value: Any, default: Any) -> str:
    return "" if _given(value) else f"{value!r}: DeepSpeed's default, {default!r}: "
