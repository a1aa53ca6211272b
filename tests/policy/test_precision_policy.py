"""The policy: what may be written, what it is normalised to, and every fault of it at once."""

import inspect
import json
from dataclasses import FrozenInstanceError, asdict, fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.connector import _convert_precision_to_unified_args
from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT_STR_ALIAS_CONVERSION

from lightning_mp import FP8, Checkpointing, LossScaling, MixedPrecisionPlan, NonFinite, Pin, PlanError, PrecisionPolicy
from lightning_mp.policy import PRECISIONS, STORAGE_DTYPES, precision_word
from lightning_mp.policy.precision_policy import TF32_SETTINGS
from support.running import faults_of
from support.scales import scalings

words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
storage = st.sampled_from(STORAGE_DTYPES)
outputs = st.none() | st.sampled_from(["pin", "input"]) | storage
wide_pins = st.builds(Pin, pattern=words, dtype=st.sampled_from(["bf16", "fp16"]), accumulate=st.just("fp32"))
pins = st.builds(Pin, pattern=words, dtype=storage, output=outputs) | wide_pins


@st.composite
def checkpointings(draw: st.DrawFn) -> Checkpointing:
    mode = draw(st.sampled_from(["full", "selective"]))
    return Checkpointing(
        modules=draw(words | st.lists(words, min_size=1, max_size=3)),  # type: ignore[arg-type]
        mode=mode,
        every=draw(st.integers(1, 9)),
        save_ops=draw(st.none() | st.lists(words, max_size=3)) if mode == "selective" else None,  # type: ignore[arg-type]
        preserve_rng=draw(st.booleans()),
    )


@st.composite
def fp8_rules(draw: st.DrawFn) -> FP8:
    recipe = draw(st.sampled_from(["rowwise", "tensorwise", "rowwise_gw_hp", "mxfp8", "mxfp8_gw_hp"]))
    return FP8(
        recipe=recipe,
        modules=draw(words | st.lists(words, min_size=1, max_size=3)),  # type: ignore[arg-type]
        skip=draw(words | st.lists(words, max_size=3)),  # type: ignore[arg-type]
        all_gather=draw(st.booleans()) if recipe == "tensorwise" else False,
        evaluate=draw(st.sampled_from(["bf16", "fp8"])),
        emulate=draw(st.booleans()),
        small=draw(st.sampled_from(["skip", "convert"])),
    )


@st.composite
def policies(draw: st.DrawFn) -> PrecisionPolicy:
    precision = draw(st.sampled_from(PRECISIONS))
    scaled = precision in ("16-mixed", "16-true", "auto")
    actions = st.sampled_from(["skip", "raise", "ignore"])
    return PrecisionPolicy(
        precision=precision,
        loss_scaling=draw(st.none() | scalings()) if scaled else None,
        pins=tuple(draw(st.lists(pins, max_size=3))),
        tf32=draw(st.none() | st.sampled_from(TF32_SETTINGS)),
        checkpointing=draw(st.none() | checkpointings()),
        fp8=draw(st.none() | fp8_rules()) if precision == "fp8-mixed" else None,
        nonfinite=NonFinite(action=draw(actions), max_consecutive=draw(st.integers(0, 200))),
        reduce_dtype=draw(storage),
        buffer_dtype=draw(st.none() | storage),
    )


@settings(max_examples=30)
@given(policy=policies())
def test_a_policy_is_the_mapping_it_is_written_as(policy: PrecisionPolicy) -> None:
    written = policy.to_dict()
    assert written.keys() == {item.name for item in fields(PrecisionPolicy)}
    assert PrecisionPolicy.from_dict(written) == policy
    assert PrecisionPolicy.from_dict(json.loads(json.dumps(written))) == policy


NAMES = {kind.__name__: kind for kind in (FP8, Checkpointing, LossScaling, NonFinite, Pin, PrecisionPolicy)}
NAMES["MixedPrecisionPlan"] = MixedPrecisionPlan


@settings(max_examples=30)
@given(policy=policies())
def test_what_is_printed_builds_it_again(policy: PrecisionPolicy) -> None:
    assert eval(repr(policy), NAMES) == policy
    assert eval(repr(MixedPrecisionPlan.from_policy(policy)), NAMES).policy == policy


def test_a_policy_is_frozen_hashable_and_takes_keywords_only() -> None:
    policy = PrecisionPolicy(pins={"*norm*": "fp32"}, checkpointing="Block")  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        policy.precision = "auto"  # type: ignore[misc]
    with pytest.raises(TypeError):
        PrecisionPolicy("auto")  # type: ignore[misc]
    assert hash(policy) == hash(PrecisionPolicy.from_dict(policy.to_dict()))


@pytest.mark.parametrize(
    ("precision", "stored", "computed", "mixed", "scaled"),
    [
        ("32-true", "fp32", "fp32", False, False),
        ("bf16-mixed", "fp32", "bf16", True, False),
        ("16-mixed", "fp32", "fp16", True, True),
        ("bf16-true", "bf16", "bf16", False, False),
        ("16-true", "fp16", "fp16", False, True),
    ],
)
def test_a_mode(precision: str, stored: str, computed: str, mixed: bool, scaled: bool) -> None:
    policy = PrecisionPolicy(precision=precision)
    assert (policy.storage_dtype, policy.compute_dtype, policy.mixed) == (stored, computed, mixed)
    assert policy.loss_scaling == (LossScaling() if scaled else None)
    assert policy.reduce_dtype == "fp32"


def test_the_default_is_bf16_mixed_that_skips_non_finite_steps() -> None:
    policy = PrecisionPolicy()
    assert policy.precision == "bf16-mixed"
    assert policy.nonfinite == NonFinite(action="skip", max_consecutive=100)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        *[(alias, "fp32") for alias in ("fp32", "float32", "float", "32", 32, torch.float32, "torch.float32", "FP32")],
        *[(alias, "bf16") for alias in ("bf16", "bfloat16", torch.bfloat16, "torch.bfloat16", "BFloat16")],
        *[(alias, "fp16") for alias in ("fp16", "float16", "half", "16", 16, torch.float16, torch.half)],
    ],
    ids=str,
)
def test_a_dtype_has_one_name(written: Any, name: str) -> None:
    assert Pin("norm", written).dtype == PrecisionPolicy(reduce_dtype=written).reduce_dtype == name


@pytest.mark.parametrize("written", ["fp64", torch.float64, "int8", torch.int8, None, "flaot32", torch, "tf32", "fp8"])
def test_what_is_no_format_to_store_in_is_refused_with_the_list(written: Any) -> None:
    (fault,) = faults_of(lambda: Pin("norm", written))
    assert (fault.problem, fault.allowed) == (f"pin 'norm': dtype={written!r}", "fp32, bf16, fp16")


NORM = (Pin("*norm*", "fp32"),)


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        (None, ()),
        ({}, ()),
        ([], ()),
        ({"*norm*": "fp32"}, NORM),
        ({"*norm*": torch.float32}, NORM),
        ({"*norm*": {"dtype": "float32"}}, NORM),
        ({"*norm*": Pin("ignored", "fp32")}, NORM),
        ([Pin("*norm*", "fp32")], NORM),
        ([{"pattern": "*norm*", "dtype": "fp32"}], NORM),
        (iter(NORM), NORM),
        ({"a": {"dtype": "fp16", "output": torch.float32}}, (Pin("a", "fp16", "fp32"),)),
        ({"a": {"dtype": "bf16", "accumulate": torch.float32}}, (Pin("a", "bf16", accumulate="fp32"),)),
        ({"b": "bf16", "a": "fp32"}, (Pin("b", "bf16"), Pin("a", "fp32"))),
    ],
    ids=range(13),
)
def test_pins_may_be_written_in_many_forms(pins: Any, expected: tuple[Pin, ...]) -> None:
    assert PrecisionPolicy(pins=pins).pins == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [(None, None), (True, "high"), (False, "highest"), *[(setting, setting) for setting in TF32_SETTINGS]],
)
def test_tf32_may_be_a_switch_or_torchs_word(written: Any, expected: str | None) -> None:
    assert PrecisionPolicy(tf32=written).tf32 == expected


WORDS: dict[str, tuple[Any, ...]] = {
    "16-mixed": (16, "16", "fp16", "float16", "half", torch.float16, "FP16", "Half", "16_mixed", " 16-mixed "),
    "bf16-mixed": ("bf16", "bfloat16", torch.bfloat16, "BF16", "bfloat16-mixed", "bf16_mixed"),
    "32-true": (32, "32", "fp32", "float32", "float", torch.float32, "fp32-true", "32_true"),
    "bf16-true": ("bf16_true", "bfloat16-true", "BF16-True"),
    "16-true": ("fp16-true", "16_true", "half-true"),
    "fp8-mixed": ("fp8", "float8", "FP8", "fp8_mixed", "float8-mixed"),
    "auto": ("AUTO",),
}


@pytest.mark.parametrize(("word", "means"), [(word, mode) for mode, words in WORDS.items() for word in words], ids=str)
def test_a_word_means_one_precision_wherever_it_is_written(word: Any, means: str) -> None:
    assert MixedPrecisionPlan(word).policy == PrecisionPolicy(precision=means)
    assert MixedPrecisionPlan(precision=word).precision == means
    assert MixedPrecisionPlan.from_config({"precision": word}).policy == PrecisionPolicy(precision=means)


@pytest.mark.filterwarnings("ignore:.*is supported for historical reasons")
@pytest.mark.parametrize("word", [word for word in _PRECISION_INPUT_STR_ALIAS_CONVERSION if "64" not in word])
def test_lightnings_own_words_mean_what_they_mean_to_its_trainer(word: str) -> None:
    lightning = _convert_precision_to_unified_args(word)  # type: ignore[arg-type]
    assert precision_word(word) == lightning


@pytest.mark.parametrize(
    "other", ["64", "64-true", "fp8-true", "tf32", "mixed", "", None, True, 16.0, [16], "32-mixed", "auto-mixed"]
)
def test_other_words_mean_none(other: Any) -> None:
    assert precision_word(other) is None


def test_the_defaults_are_rowwise_with_bf16_evaluation_and_the_head_left_out() -> None:
    policy = PrecisionPolicy(precision="fp8-mixed")
    assert policy.fp8 == FP8(recipe="rowwise", modules="*", skip=("lm_head",), evaluate="bf16", small="skip")
    assert (policy.storage_dtype, policy.compute_dtype, policy.reduce_dtype) == ("fp32", "bf16", "fp32")
    assert policy.mixed
    assert policy.loss_scaling is None
    assert PrecisionPolicy().fp8 is None


@pytest.mark.parametrize("written", ["tensorwise", {"recipe": "tensorwise"}, FP8(recipe="tensorwise")], ids=str)
def test_a_recipe_a_mapping_and_the_class_say_the_same(written: Any) -> None:
    assert MixedPrecisionPlan("fp8", fp8=written).policy.fp8 == FP8(recipe="tensorwise")


@pytest.mark.parametrize(
    ("fields", "given", "fix"),
    [
        ({"recipe": "row"}, "recipe='row'", "did you mean 'rowwise'"),
        ({"modules": ()}, "modules=()", "write modules="),
        ({"modules": 3}, "modules=3", ""),
        ({"skip": ["a", ""]}, "skip=['a', '']", ""),
        ({"skip": None}, "skip=None", ""),
        ({"all_gather": 1, "recipe": "tensorwise"}, "all_gather=1", "boolean"),
        ({"all_gather": True}, "all_gather=True with recipe='rowwise'", "recipe='tensorwise'"),
        ({"evaluate": "fp16"}, "evaluate='fp16'", "bf16"),
        ({"emulate": "no"}, "emulate='no'", "boolean"),
        ({"small": True}, "small=True", "skip"),
    ],
    ids=str,
)
def test_a_bad_value_is_named(fields: dict[str, Any], given: str, fix: str) -> None:
    (fault,) = faults_of(lambda: FP8(**fields))
    assert fault.problem.startswith(given)
    assert fix in fault.fix


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true", "auto"])
def test_it_is_refused_beside_another_precision(precision: str) -> None:
    with pytest.raises(PlanError, match="'fp8-mixed'"):
        MixedPrecisionPlan(precision, fp8=FP8())


MODES = ", ".join(PRECISIONS)
STORED = "fp32, bf16, fp16"
#: fields → what was given, what is allowed, what to do; parts of the message
BAD: list[tuple[dict[str, Any], str, str, str]] = [
    ({"precision": "fp8-true"}, "precision='fp8-true'", MODES, "did you mean"),
    ({"precision": "half-mixd"}, "precision='half-mixd'", MODES, "did you mean '16-mixed'?"),
    ({"precision": "64-true"}, "precision='64-true'", MODES, "double precision is not offered"),
    ({"precision": "A100"}, "precision='A100'", MODES, "MixedPrecisionPlan.preset('a100')"),
    ({"precision": None}, "precision=None", MODES, "write one of these"),
    *(({"precision": mode, "loss_scaling": LossScaling()}, f"loss_scaling with precision={mode!r}",
       "16-mixed, 16-true, auto", "remove loss_scaling") for mode in ("bf16-mixed", "32-true", "bf16-true")),
    ({"precision": "16", "loss_scaling": 128}, "loss_scaling=128", "LossScaling(...)", "write LossScaling(...)"),
    ({"precision": "16-mixed", "loss_scaling": {"init_scale": 0}}, "init_scale=0", "a finite number > 0", "65536"),
    ({"precision": "16-mixed", "loss_scaling": {"intial_scale": 8}}, "unknown key loss_scaling.intial_scale",
     "init_scale, growth_factor", "'init_scale'"),
    ({"pins": "*norm*"}, "pins='*norm*'", "a mapping of pattern to dtype", "pins={'*norm*': 'fp32'}"),
    ({"pins": {"*norm*": "fp64"}}, "pin '*norm*': dtype='fp64'", STORED, ""),
    ({"pins": {"": "fp32"}}, "pattern=''", "a non-empty fnmatch pattern", "'*norm*'"),
    ({"pins": [{"pattern": "a", "dtyp": "fp32", "dtype": "fp32"}]}, "unknown key pins.dtyp", "pattern, dtype",
     "'dtype'"),
    ({"pins": {"a": {"dtype": "fp32", "output": "same"}}}, "pin 'a': output='same'", "pin, input", ""),
    ({"pins": {"a": {"dtype": "bf16", "accumulate": "bf16"}}}, "pin 'a': accumulate='bf16'", "'fp32'", "leave it out"),
    ({"pins": {"a": {"dtype": "fp32", "accumulate": "fp32"}}}, "pin 'a': accumulate with dtype='fp32'", "", "'bf16'"),
    ({"pins": {"a": {"dtype": "bf16", "accumulate": "fp32", "output": "bf16"}}},
     "pin 'a': accumulate with output='bf16'", "", "leave output out"),
    ({"tf32": "on"}, "tf32='on'", "None, True, False, 'highest', 'high', 'medium'", "write 'high'"),
    ({"checkpointing": {}}, "checkpointing={}", "the fields of Checkpointing", "add 'modules'"),
    ({"checkpointing": {"modules": ""}}, "modules=''", "a pattern, a module class, or several", "'*.h.*'"),
    ({"checkpointing": {"modules": "a", "mode": "some"}}, "mode='some'", "'full', 'selective'", ""),
    ({"checkpointing": {"modules": "a", "every": 0}}, "every=0", "a whole number >= 1", "1"),
    ({"checkpointing": {"modules": "a", "save_ops": ["mm"]}}, "save_ops with mode='full'", "", "selective"),
    ({"nonfinite": "stop"}, "nonfinite='stop'", "'skip', 'raise', 'ignore'", "'skip'"),
    ({"nonfinite": {"max_consecutive": -1}}, "max_consecutive=-1", "a whole number >= 0", "100"),
    ({"reduce_dtype": "fp8"}, "reduce_dtype='fp8'", STORED, "fp8 is no storage format"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "given", "allowed", "fix"), BAD, ids=[row[1] for row in BAD])
def test_a_fault_says_what_is_allowed_and_what_to_do(
    fields: dict[str, Any], given: str, allowed: str, fix: str
) -> None:
    with pytest.raises(PlanError) as error:
        PrecisionPolicy(**fields)
    (fault,) = error.value.faults
    assert fault.problem == given
    assert allowed in fault.allowed
    assert fix in fault.fix
    assert fault.fix
    assert str(fault) in str(error.value)
    assert faults_of(lambda: MixedPrecisionPlan(**fields)) == error.value.faults


@pytest.mark.parametrize(
    ("keyword", "fix"),
    [
        ("pin", "did you mean 'pins', 'precision'?"),
        ("gradient_checkpointing", "did you mean 'checkpointing'?"),
        ("lossscale", "did you mean 'loss_scaling'?"),
        ("zzz", "remove it"),
    ],
)
def test_a_keyword_the_plan_does_not_have_is_refused(keyword: str, fix: str) -> None:
    with pytest.raises(PlanError) as error:
        MixedPrecisionPlan("16-mixed", **{keyword: None})  # type: ignore[arg-type]
    (fault,) = error.value.faults
    assert (fault.problem, fault.fix) == (f"unknown argument '{keyword}'", fix)
    assert fault.allowed == ", ".join(["precision", *inspect.signature(MixedPrecisionPlan).parameters][1:])


def test_every_fault_of_every_field_is_told_at_once() -> None:
    with pytest.raises(PlanError) as error:
        PrecisionPolicy.from_dict(
            {
                "precision": "17-mixed",
                "loss_scaling": {"init_scale": -1, "growth_factor": 0.5, "grwth_interval": 3},
                "pins": [{"pattern": "a", "dtype": "fp12"}, "b", {"pattern": "c", "dtype": "bf16", "outptu": "pin"}],
                "tf32": "on",
                "checkpointing": {"modules": "a", "mode": "some", "every": 0},
                "nonfinite": {"action": "stop", "max_consecutive": -1},
                "reduce_dtype": "int8",
                "buffer_dtype": "fp99",
                "precison": "16-mixed",
            }
        )
    assert {fault.problem for fault in error.value.faults} == {
        *("unknown key precison", "unknown key loss_scaling.grwth_interval", "unknown key pins.outptu"),
        *("precision='17-mixed'", "init_scale=-1", "growth_factor=0.5", "pin 'a': dtype='fp12'", "pins=['b']"),
        *("tf32='on'", "mode='some'", "every=0", "nonfinite='stop'", "max_consecutive=-1"),
        *("reduce_dtype='int8'", "buffer_dtype='fp99'"),
    }
    assert str(error.value).startswith("MixedPrecisionPlan: 15 errors.")


NAN, INF = float("nan"), float("inf")
FRACTION, WHOLE = "a number between 0 and 1, both left out", "a whole number >= "
#: by field, values out of its range and what is allowed; then what is wrong together
RANGES: dict[str, tuple[tuple[Any, ...], str]] = {
    "init_scale": ((0, -1, NAN, INF, "8", None, True), "a finite number > 0"),
    "growth_factor": ((1, 0.5, 0, -2, NAN, INF), "a finite number > 1"),
    "backoff_factor": ((1, 2, 0, -0.5, NAN), FRACTION),
    "growth_interval": ((0, -1, 2.0, "3", True), f"{WHOLE}1"),
    "growth_delay": ((-1, 0.5), f"{WHOLE}0"),
    "hysteresis": ((0, -1, 1.5, None), f"{WHOLE}1"),
    "min_scale": ((-1, NAN, INF, "1"), "a finite number >= 0"),
    "max_scale": ((0, -1, NAN, "1", True), "None or a number > 0"),
    "at_min": (("stop",), "'hold', 'raise'"),
    "dynamic": (("false",), "True, False"),
    "consecutive_hysteresis": (("no",), "True, False"),
}
OUT_OF_RANGE: list[tuple[dict[str, Any], str, str]] = [
    *(({name: value}, f"{name}={value!r}", allowed) for name, (values, allowed) in RANGES.items() for value in values),
    ({"init_scale": 1e39}, "init_scale=1e+39", "fp32"),
    ({"init_scale": 1e-50, "min_scale": 0}, "init_scale=1e-50", "fp32"),
    ({"min_scale": 8, "max_scale": 4}, "min_scale=8 above max_scale=4", ""),
    ({"init_scale": 0.5}, "init_scale=0.5 with min_scale=1.0, max_scale=None", ""),
    ({"max_scale": 1024}, "init_scale=65536.0 with min_scale=1.0, max_scale=1024", ""),
]


@pytest.mark.parametrize(("written", "given", "allowed"), OUT_OF_RANGE, ids=[row[1] for row in OUT_OF_RANGE])
def test_a_value_out_of_its_range_is_refused(written: dict[str, Any], given: str, allowed: str) -> None:
    (fault,) = faults_of(lambda: LossScaling(**written))
    assert fault.problem == given
    assert allowed in fault.allowed
    assert fault.fix


def test_alone_it_is_torchs_rule_with_a_floor_of_1_that_is_held() -> None:
    alone = LossScaling()
    assert (alone.min_scale, alone.at_min) == (1.0, "hold")
    assert {**asdict(alone), "min_scale": 0.0} == asdict(LossScaling.torch())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LossScaling.torch(), {"min_scale": 0, "max_scale": None, "growth_interval": 2000, "at_min": "hold"}),
        (LossScaling.deepspeed(), {"growth_interval": 1000, "growth_delay": 1, "at_min": "raise", "dynamic": True}),
        (LossScaling.deepspeed(loss_scale=0.5), {"init_scale": 0.5, "dynamic": False}),
        (LossScaling.megatron(), {"min_scale": 1, "growth_interval": 1000, "at_min": "hold"}),
    ],
    ids=range(4),
)
def test_a_constructor_is_a_choice_of_fields(config: LossScaling, expected: dict[str, Any]) -> None:
    assert {name: getattr(config, name) for name in expected} == expected
