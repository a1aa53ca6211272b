"""A plan from a DeepSpeed JSON: thirty real ones, every word of the precision blocks, and what is refused."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lightning_mp import Checkpointing, LossScaling, MixedPrecisionPlan, NonFinite, PlanError
from lightning_mp.deepspeed.read import BLOCKS, REFUSED, DeepSpeedNotes, load_json
from support.deepspeed_json import DEEPSPEED, REAL, WHOLE_FP16, anything, composed, faults_of, nested, parse

read = MixedPrecisionPlan.from_deepspeed


def notes_of(config: Any) -> DeepSpeedNotes:
    notes = read(config).deepspeed_notes
    assert notes is not None
    return notes


#: name -> precision, then what neither plan nor engine takes; or the reasons for which it is refused
TAKEN = {
    "16-mixed": "accelerate-zero1 accelerate-zero2-offload accelerate-zero3-offload dolly-v100 dse-onebitlamb "
    "dse-deberta longspec-slim6b hf-zero3-fp16",
    "bf16-mixed": "accelerate-alst axolotl-zero3-bf16-offload dolly-a100 longspec-zero1-cosine",
    "auto": "accelerate-zero3-model-only llamafactory-zero0 llamafactory-zero2-autotp axolotl-zero1-compile "
    "fastchat-zero2 fastchat-zero3 alpaca-offload chatglm-ptuning qwen-zero3 llava-zero3-offload "
    "hf-zero2",
    "32-true": "dse-glue-fp32",
}
EXPECTED: dict[str, tuple[str, set[str]] | list[str]] = {
    **{name: (mode, set()) for mode, names in TAKEN.items() for name in names.split()},
    "llamafactory-zero3-fp8-now": ["bf16.enabled='auto' with fp16.enabled=False"],
    "dse-zenflow": ("bf16-mixed", {"zero_optimization.zenflow"}),
    "dse-imagenet-zero1": ("16-mixed", {"cuda_visible_devices"}),
    "dse-bf16-masters": ["bf16.bf16_master_weights_and_grads=True", "bf16.bf16_optimizer_states=True"],
    "dse-moq": ["quantize_training="],
    "llamafactory-zero3-fp8-then": ["fp8="],
}
#: where the rule is another than DeepSpeed's defaults
RULES = {
    "axolotl-zero1-compile": LossScaling.deepspeed(initial_scale_power=32),
    "dse-deberta": LossScaling.deepspeed(initial_scale_power=12),
}


@pytest.mark.parametrize("name", REAL)
def test_a_real_config_is_read_or_refused_with_its_reasons(name: str) -> None:
    config, expected = REAL[name]["config"], EXPECTED[name]
    before = copy.deepcopy(config)
    if isinstance(expected, list):
        found = faults_of(lambda: read(config))
        assert all(fault.problem.startswith(given) for fault, given in zip(found, expected, strict=True)), found
        return
    policy = read(config).policy
    precision, refused = expected
    assert policy.precision == precision
    assert policy.loss_scaling == (RULES.get(name, DEEPSPEED) if precision in ("16-mixed", "auto") else None)
    assert set(notes_of(config).refused) == refused
    assert config == before


def told(notes: DeepSpeedNotes, key: str) -> bool:
    return any(
        name == key or name.startswith(f"{key}.") for kind in (notes.taken, notes.left, notes.refused) for name in kind
    )


#: as floats too, which DeepSpeed takes for whole numbers
OTHER: dict[str, Any] = {"initial_scale_power": 8.0, "loss_scale_window": 500.0, "hysteresis": 3, "min_loss_scale": 4}
OTHER |= {"consecutive_hysteresis": True}
#: a JSON, and fields of the policy
READ: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"precision": "32-true"}),
    ({"fp16.enabled": True}, {"precision": "16-mixed", "loss_scaling": DEEPSPEED}),
    ({"bf16.enabled": True}, {"precision": "bf16-mixed", "loss_scaling": None}),
    ({"fp16.enabled": "auto", "bf16.enabled": True}, {"precision": "bf16-mixed"}),
    ({"fp16.enabled": "auto"}, {"precision": "auto", "loss_scaling": DEEPSPEED}),
    ({"torch_autocast.enabled": True, "torch_autocast.dtype": "torch.bfloat16"}, {"precision": "bf16-mixed"}),
    (
        {"torch_autocast.enabled": True, "torch_autocast.dtype": "fp16"},
        {"precision": "16-mixed", "loss_scaling": LossScaling.torch()},
    ),
    ({"fp16.enabled": True, "fp16.loss_scale": 128}, {"loss_scaling": LossScaling.static(128)}),
    ({"fp16": WHOLE_FP16 | OTHER}, {"loss_scaling": LossScaling.deepspeed(0, 8, 500, 3, True, 4)}),
    ({"communication_data_type": "bf16"}, {"reduce_dtype": "bf16"}),
    ({"data_types.grad_accum_dtype": "fp32", "data_types.buffer_dtype": "bf16"}, {"buffer_dtype": "bf16"}),
    ({"bf16.enabled": True, "bf16.check_grad_overflow": False}, {"nonfinite": NonFinite(action="ignore")}),
]


@pytest.mark.parametrize(("config", "fields"), READ, ids=[str(config) for config, _ in READ])
def test_what_a_json_says_of_formats_is_the_policy(config: dict[str, Any], fields: dict[str, Any]) -> None:
    config = nested(config)
    policy = read(config).policy
    assert {field: getattr(policy, field) for field in fields} == fields
    assert all(told(notes_of(config), key) for key in config)


#: a JSON, and how each of its faults begins
REFUSED_JSON: list[tuple[dict[str, Any], list[str]]] = [
    ({"fp16.enabled": True, "bf16.enabled": True}, ["fp16.enabled=True and bf16.enabled=True"]),
    (
        {"fp16.enabled": True, "torch_autocast.enabled": True, "torch_autocast.dtype": "bf16"},
        ["fp16.enabled=True and torch_autocast.enabled=True with dtype='bf16'"],
    ),
    ({"fp16.enabled": "auto", "bf16.enabled": False}, ["fp16.enabled='auto' with bf16.enabled=False"]),
    ({"torch_autocast.enabled": "auto"}, ["torch_autocast.enabled='auto'"]),
    ({"loss_scale": 128}, ["unknown key loss_scale"]),
    ({"fp16.enabled": True, "fp16.loss_scale": 10**400}, ["fp16: init_scale=1000"]),
    ({"fp16.enabled": True, "fp16.initial_scale_power": 200}, ["fp16: initial_scale_power=200"]),
    ({"fp16.fp16_master_weights_and_grads": True}, ["fp16.fp16_master_weights_and_grads=True"]),
    (
        {
            "amp": True, "fp16.enabled": True, "fp16.hysteresis": 0, "fp16.los_scale": 1, "bf16.enabled": True,
            "bf16.bf16_master_weights_and_grads": True,
        },
        ["unknown key fp16.los_scale", "fp16.hysteresis=0", "amp=True", "fp16.enabled=True and bf", "bf16.bf16_master"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "given"), REFUSED_JSON, ids=[str(given) for _, given in REFUSED_JSON])
def test_what_a_plan_cannot_carry_out_is_one_error(config: dict[str, Any], given: list[str]) -> None:
    found = faults_of(lambda: read(nested(config)))
    assert len(found) == len(given), found
    assert all(any(fault.problem.startswith(word) for fault in found) for word in given), found


#: a JSON, the key that stands in the notes as refused or left, and a word of the reason
TOLD: list[tuple[dict[str, Any], str, str, str]] = [
    ({"gradient_cliping": 1.0}, "refused", "gradient_cliping", "did you mean 'gradient_clipping'"),
    (
        {"zero_optimization.zero_quantized_gradients": True},
        *("refused", "zero_optimization.zero_quantized_gradients", "the plan's reduce_dtype"),
    ),
    ({"gradient_clipping": 1.0}, "left", "gradient_clipping", "Trainer(gradient_clip_val=...)"),
    ({"train_batch_size": 32}, "left", "train_batch_size", "batch_size x"),
    ({"optimizer.type": "AdamW"}, "left", "optimizer", "configure_optimizers()"),
    ({"activation_checkpointing.partition_activations": True}, "left", "activation_checkpointing", "checkpointing="),
    ({"zero_optimization.stage": 3}, "left", "zero_optimization", "make_strategy('deepspeed_zero1' to"),
    ({"_comment": "as in the paper"}, "left", "_comment", "a comment"),
]


@pytest.mark.parametrize(("config", "kind", "key", "words"), TOLD, ids=[key for _, _, key, _ in TOLD])
def test_what_the_plan_does_not_take_is_told_and_why(config: dict[str, Any], kind: str, key: str, words: str) -> None:
    notes = notes_of(nested(config))
    assert words in getattr(notes, kind)[key]
    assert kind == "refused" or not notes.taken | notes.refused


@given(config=anything())
@example(config={"fp16": {"enabled": True, "min_loss_scale": 10**400}})
@example(config={"gradient_accumulation_steps": math.inf})
def test_any_json_is_read_with_every_key_told_or_refused(config: dict[str, Any]) -> None:
    before = repr(config)
    try:
        notes = notes_of(config)
    except PlanError:
        notes = None
    assert repr(config) == before
    assert notes is None or [key for key in config if not told(notes, key)] == []


def test_a_file_a_mapping_and_omegaconf_read_as_the_same_plain_dict(tmp_path: Path) -> None:
    small = {"fp16": {"enabled": True, "loss_scale": 0}, "optimizer": {"params": {"betas": [0.9, 0.95]}}}
    path = tmp_path / "ds.json"
    path.write_text("\ufeff" + json.dumps(small), encoding="utf-8")
    for source in (small, OmegaConf.create(small), path, str(path)):
        found = load_json(source)
        assert found == small
        assert (type(found), type(found["optimizer"]["params"]["betas"])) == (dict, list)


@pytest.mark.parametrize(
    ("text", "words"), [('{"fp16": {}\n // on\n}', "line 2"), ("", "line 1"), ("[1]", "a list"), (None, "No such file")]
)
def test_a_file_that_is_no_json_object_says_where_and_why(text: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    (fault,) = faults_of(lambda: load_json(path))
    assert str(path) in fault.problem
    assert words in fault.problem


def test_the_lists_of_keys_are_the_installed_deepspeeds() -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    precision = pytest.importorskip("deepspeed.runtime.precision_config")
    assert set(getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", ())) <= set(REFUSED)
    for name, model in {"fp16": precision.DeepSpeedFP16Config, "bf16": precision.DeepSpeedBF16Config}.items():
        assert set(BLOCKS[name]) == set(model.model_fields), name


WRITABLE = ("32-true", "bf16-mixed", "16-mixed")
BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


def plan(precision: str = "16-mixed", **fields: Any) -> MixedPrecisionPlan:
    if precision == "16-mixed":
        fields.setdefault("loss_scaling", DEEPSPEED)
    return MixedPrecisionPlan(precision, **fields)  # type: ignore[arg-type]


@st.composite
def said_by_deepspeed(draw: st.DrawFn) -> MixedPrecisionPlan:
    """Any plan that a DeepSpeed JSON can say."""
    precision = draw(st.sampled_from(WRITABLE))
    fields: dict[str, Any] = {
        "reduce_dtype": draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        "buffer_dtype": draw(st.sampled_from([None, "fp32", "bf16", "fp16"])),
    }
    if precision == "bf16-mixed":
        fields["nonfinite"] = draw(st.sampled_from(["skip", "ignore"]))
    if precision == "16-mixed":
        power = draw(st.integers(0, 32))
        dynamic = LossScaling.deepspeed(
            initial_scale_power=power,
            loss_scale_window=draw(st.integers(1, 5000)),
            hysteresis=draw(st.integers(1, 5)),
            consecutive_hysteresis=draw(st.booleans()),
            min_loss_scale=draw(st.integers(1, 2**power)),
        )
        fields["loss_scaling"] = draw(st.sampled_from([dynamic, LossScaling.static(draw(st.floats(1e-3, 1e9)))]))
    return plan(precision, **fields)


@given(written=said_by_deepspeed(), stage=st.sampled_from([1, 2, 3]), offload=st.booleans())
def test_what_deepspeed_can_say_comes_back_as_it_was(written: MixedPrecisionPlan, stage: int, offload: bool) -> None:
    config = written.to_deepspeed(stage=stage, offload_optimizer=offload)
    assert "_comment" not in config
    seen = parse(json.loads(json.dumps(config)))
    assert seen.zero_optimization_stage == stage
    assert seen.float16_config.enabled == (written.policy.precision == "16-mixed")
    assert seen.bfloat16_config.enabled == (written.policy.precision == "bf16-mixed")
    back = MixedPrecisionPlan.from_deepspeed(config)
    assert back.policy == written.policy
    assert back.deepspeed_notes is not None
    assert not back.deepspeed_notes.refused


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", WRITABLE)
def test_the_plans_own_strategies_get_the_same_but_for_the_bf16_engine(precision: str, stage: int) -> None:
    written = plan(precision).to_deepspeed(stage=stage, offload_optimizer=True)
    alone = composed(precision, stage=stage, offload_optimizer=True)
    merged = composed(precision, written, stage=stage, offload_optimizer=True)
    assert {key: value for key, value in merged.items() if key not in BATCH} == alone
    changed = {key for key in alone if written[key] != alone[key]}
    assert changed == ({"bf16"} if precision == "bf16-mixed" else set())


def test_a_path_gets_the_same_as_json(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    config = plan(tf32="high").to_deepspeed(path, stage=3)
    assert json.loads(path.read_text(encoding="utf-8")) == config
    assert parse(json.loads(path.read_text(encoding="utf-8"))).zero_optimization_stage == 3
    assert MixedPrecisionPlan.from_deepspeed(path).policy == plan().policy


UNWRITABLE: list[tuple[MixedPrecisionPlan, list[str]]] = [
    (plan(loss_scaling=LossScaling(growth_factor=4.0)), ["loss_scaling.growth_factor=4.0"]),
    (plan(loss_scaling=LossScaling(init_scale=0.5, min_scale=0)), ["init_scale=0.5", "min_scale=0"]),
    (plan(loss_scaling=LossScaling(min_scale=1.5)), ["loss_scaling.min_scale=1.5"]),
    (plan("bf16-true"), ["precision='bf16-true'"]),
    (plan("auto"), ["precision='auto'"]),
    (plan("bf16-mixed", nonfinite="raise"), ["nonfinite.action='raise'"]),
]


@pytest.mark.parametrize(("written", "words"), UNWRITABLE, ids=[str(words) for _, words in UNWRITABLE])
def test_what_deepspeed_does_otherwise_is_refused(
    written: MixedPrecisionPlan, words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    found = faults_of(lambda: written.to_deepspeed(path, stage=2))
    assert len(found) == len(words), found
    assert all(word in fault.problem for word, fault in zip(words, found, strict=True))
    assert not path.exists()


#: fields that a JSON has no key for, and how their line begins
UNSAID: list[tuple[dict[str, Any], list[str]]] = [
    ({"pins": {"*norm*": "fp32", "lm_head": "bf16"}}, ["pins={'*norm*': 'fp32', 'lm_head': 'bf16'}:"]),
    ({"tf32": "high"}, ["tf32='high':"]),
    ({"checkpointing": Checkpointing(modules="*.h.*")}, ["checkpointing={'modules': '*.h.*'"]),
    ({"nonfinite": NonFinite(max_consecutive=3)}, ["nonfinite.max_consecutive=3:"]),
    (
        {"loss_scaling": LossScaling()},
        ["loss_scaling.growth_delay=0:", "loss_scaling.max_scale=None:", "loss_scaling.at_min='hold':"],
    ),
]


@pytest.mark.parametrize(("fields", "lines"), UNSAID, ids=[str(lines) for _, lines in UNSAID])
def test_what_json_has_no_key_for_stands_in_a_comment(fields: dict[str, Any], lines: list[str]) -> None:
    config = plan(**fields).to_deepspeed(stage=2)
    assert next(iter(config)) == "_comment"
    assert all(line.startswith(words) for line, words in zip(config["_comment"], lines, strict=True))
    assert parse(config).float16_config.enabled
