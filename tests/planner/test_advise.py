"""What is advised: precision by the rules, layouts that fit, reasons, refusals with every fault, the file that runs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner, Result

from benchmarks import planner_pages
from lightning_mp import PlanError
from lightning_mp.cli import app
from lightning_mp.planner import Advice, ModelShape, advise, estimate, flops_per_token
from lightning_mp.planner.memory import HELD, STRATEGIES, held
from lightning_mp.planner.shape import _USUAL, PRECISIONS
from lightning_mp.policy.hardware import GPUS
from lightning_mp.strategies.registry import STRATEGIES as REGISTERED
from support.docs import text

SEVEN = ModelShape.of_size(7e9, seq_len=4096)


@pytest.mark.parametrize(
    ("params", "gpu", "gpus", "precision", "strategy", "tensor"),
    [
        (50e6, "a100-80", 8, "32-true", "ddp", 1),
        (125e6, "a100-40", 8, "bf16-mixed", "ddp", 1),
        (125e6, "t4-16", 4, "16-mixed", "ddp", 1),
        (1.3e9, "rtx3090-24", 4, "bf16-mixed", "fsdp2", 1),
        (7e9, "v100-32", 8, "16-mixed", "fsdp2", 1),
        (7e9, "h100-80", 8, "bf16-mixed", "fsdp2", 1),
        (7e9, "b200-180", 1, "bf16-mixed", "auto", 1),
        (70e9, "h100-80", 64, "bf16-mixed", "fsdp2", 2),
        (405e9, "h100-80", 512, "bf16-mixed", "fsdp2", 4),
    ],
)
def test_the_best_and_all_that_fit(
    params: float, gpu: str, gpus: int, precision: str, strategy: str, tensor: int
) -> None:
    found = advise(ModelShape.of_size(params), gpu=gpu, gpus=gpus)
    best = found.choices[0]
    assert (best.precision, best.strategy) == (precision, strategy)
    assert best.tensor >= tensor
    assert best.reason
    for each in found.choices:
        assert each.data * each.tensor * each.pipeline == gpus
        assert each.tensor <= 8
        assert each.memory_bytes < GPUS[gpu].memory
        assert "offload" not in each.strategy
        low, mid, high = each.tokens_per_s
        assert 0 < low < mid < high <= 2.51 * low
    labels = {(each.strategy, each.data, each.tensor, each.pipeline) for each in found.choices}
    assert len(labels) == len(found.choices)
    speeds = [each.tokens_per_s.mid for each in found.choices]
    assert speeds[0] >= max(speeds) / 1.05


def test_what_does_not_fit_says_by_how_much_and_on_how_many_gpus_it_does() -> None:
    found = advise(ModelShape.of_size(70e9), gpu="h100-80", gpus=8)
    assert (found.choices, found.nearest_gpus) == ((), 16)
    assert found.missing_bytes > 2**30
    assert advise(found.shape, gpu="h100-80", gpus=16).choices
    with pytest.raises(PlanError, match="Use 16 GPUs"):
        found.yaml()


def test_offload_is_considered_where_it_is_asked_for() -> None:
    shape = ModelShape.of_size(13e9)
    assert not advise(shape, gpu="rtx3090-24", gpus=2).choices
    best = advise(shape, gpu="rtx3090-24", gpus=2, offload=True).choices[0]
    assert best.strategy == "fsdp2_offload"


def test_a_global_batch_is_kept_exactly() -> None:
    choices = advise(SEVEN, gpu="h100-80", gpus=16, global_batch=96).choices
    assert len({each.data for each in choices}) > 1
    for each in choices:
        assert each.data * each.micro_batch * each.accumulate == 96


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gpu": ({"gpu": "h100"}, ("unknown gpu 'h100'", "'h100-80'")),
    "all at once": (
        {"gpu": "a100_80", "nvlink": "half", "precision": "fp9", "gpus": 0},
        ("a100-80", "nvlink='half'", "precision 'fp9'", "gpus=0"),
    ),
    "numbers": ({"tokens": 0}, ("tokens=0",)),
    "fp16 misspelt": ({"precision": "fp-16"}, ("precision 'fp-16'", "did you mean '16-mixed', '16-true'?")),
    "fp8 where there is none": ({"gpu": "a100-80", "precision": "fp8"}, ("fp8-mixed", "use 'bf16-mixed'")),
    "bf16 on a V100": ({"gpu": "v100-32", "precision": "bf16"}, ("bf16-mixed", "use '16-mixed'")),
    "a batch that does not divide": ({"global_batch": 7, "micro_batch": 2}, ("global_batch=7", "multiple")),
}
BAD_LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "degrees": ({"tensor": 3, "data": 2}, ("product", "tensor=3 for 32 heads")),
    "tensor across nodes": ({"gpus": 16, "tensor": 16}, ("within a node",)),
    "stages": ({"gpus": 64, "pipeline": 64}, ("pipeline=64 for 32 layers",)),
    "strategy": ({"strategy": "fsdp3"}, ("'fsdp'",)),
    "words": ({"checkpointing": "some", "micro_batch": 0}, ("'some'", "micro_batch=0")),
}


CALLS: Any = [*((advise, *row) for row in REFUSED.values()), *((estimate, *row) for row in BAD_LAYOUTS.values())]


@pytest.mark.parametrize(("call", "given", "parts"), CALLS, ids=[*REFUSED, *BAD_LAYOUTS])
def test_what_is_asked_for_is_refused_with_every_fault(call: Any, given: dict[str, Any], parts: Any) -> None:
    with pytest.raises(PlanError) as error:
        call(SEVEN, **{"gpu": "h100-80", "gpus": 8, **given})
    for part in parts:
        assert part.lower() in str(error.value).lower()


def test_every_strategy_of_the_planner_is_one_of_the_package() -> None:
    assert set(STRATEGIES) <= set(REGISTERED)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bytes_a_parameter(precision: str) -> None:
    whole = sum(HELD[precision])
    assert whole == (8 if precision.endswith("true") and precision != "32-true" else 16)
    assert sum(held(precision, "ddp", 8)) == whole
    assert sum(held(precision, "fsdp2", 8)) == whole / 8
    # weights; gradients, moments and the weights once more on an eighth: as docs/reference/strategies.md has it
    copies = HELD[precision][0]
    assert sum(held(precision, "deepspeed_zero1", 8)) == copies + whole / 8
    assert sum(held(precision, "deepspeed_zero2", 8)) == copies + whole / 8
    halves = 2 if precision in ("bf16-mixed", "16-mixed") else copies
    assert sum(held(precision, "deepspeed_zero2_half", 8)) == halves + whole / 8
    assert sum(held(precision, "deepspeed_zero3", 8)) == (whole + whole / 4) / 8
    assert sum(held(precision, "fsdp2_offload", 8)) == 0


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def _composed(run: Path, *arguments: str) -> Any:
    told = _run("advise", *arguments, "--out", str(run))
    assert told.exit_code == 0, told.output
    shown = _run("train", str(run), "--show")
    assert shown.exit_code == 0, shown.output
    return yaml.safe_load(shown.output)


def test_the_file_is_composed_by_train_as_it_is(tmp_path: Path) -> None:
    size = ("--params", "70e9", "--gpus", "64", "--gpu", "h100-80", "--tokens", "1e9")
    found = _composed(tmp_path / "run.yaml", *size)
    advice = advise(ModelShape.of_size(70e9), gpu="h100-80", gpus=64, tokens=1e9)
    best = advice.best
    assert found["plan"]["precision"] == best.precision
    assert found["strategy"]["name"] == best.strategy
    assert found["strategy"]["tensor_parallel"] == best.tensor
    assert found["data"]["batch_size"] == best.micro_batch
    assert found["data"]["context"] == advice.shape.seq_len
    assert found["model"]["config"]["hidden_size"] == advice.shape.hidden
    assert (found["trainer"]["devices"], found["trainer"]["num_nodes"]) == (8, 8)
    steps = 1e9 / (best.data * best.micro_batch * best.accumulate * advice.shape.seq_len)
    assert found["trainer"]["max_steps"] == math.ceil(steps)


def test_the_command_prints_json_and_what_is_wrong(tmp_path: Path) -> None:
    found = _run("advise", "--params", "7b", "--json")
    assert found.output == _run("advise", "--params", "7e9", "--json").output
    assert json.loads(found.output)["choices"][0]["strategy"] == "fsdp2"
    nothing = _run("advise", "--params", "70e9", "--gpus", "1", "--json")
    assert (nothing.exit_code, json.loads(nothing.stdout)["choices"]) == (2, [])
    (tmp_path / "half").write_text("{")
    refused = {
        "": "give --params", "--params 7x": "write it as 7e9 or 7b", "--params 0": "params=0",
        "--params 7e9 --gpu h100": "'h100-80'", "--params 7e9 --price -1": "price=-1",
        f"--config {tmp_path / 'half'}": f"--config {tmp_path / 'half'}: ",
        f"--config {tmp_path / 'absent'}": f"--config {tmp_path / 'absent'}: ",
    }  # fmt: skip
    for arguments, says in refused.items():
        said = _run("advise", *arguments.split())
        assert (said.exit_code, says in said.output.replace("\n", "")) == (2, True), arguments


def test_the_file_names_the_architecture_of_a_transformers_config(tmp_path: Path) -> None:
    config = tmp_path / "gpt2.json"
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512, "n_positions": 128}
    config.write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}))
    model = _composed(tmp_path / "run.yaml", "--config", str(config), "--gpus", "1")["model"]
    assert (model["architecture"], model["config"]) == ("gpt2", sizes)


def test_of_a_module_there_is_advice_and_no_file() -> None:
    module = torch.nn.Linear(64, 64)
    with pytest.raises(PlanError, match="transformers config"):
        advise(module, gpu="a100-80", gpus=1)
    module.config = {"hidden_size": 64, "num_hidden_layers": 1}  # type: ignore[assignment]
    found = advise(module, gpu="a100-80", gpus=1)
    assert found.shape.params == 65 * 64
    with pytest.raises(PlanError, match="rite the model section yourself"):
        found.yaml()


def test_every_choice_has_a_file() -> None:
    found: Advice = advise(SEVEN, gpu="h100-80", gpus=8)
    assert all(each.strategy in found.yaml(each) for each in found.choices)


def test_a_shape_refuses_what_is_no_number() -> None:
    with pytest.raises(PlanError, match="2 errors"):
        ModelShape(params=0, layers=2, hidden="64")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="kv_heads=3 for 8 heads"):
        ModelShape(params=100, layers=2, hidden=64, heads=8, kv_heads=3)


@pytest.mark.parametrize(("params", "layers", "hidden"), _USUAL)
def test_a_size_is_near_what_was_asked_for(params: float, layers: int, hidden: int) -> None:
    assert ModelShape.of_size(params).params == pytest.approx(params, rel=0.07)


_SMALL: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
_SHARED: dict[str, Any] = {**_SMALL, "num_key_value_heads": 2, "intermediate_size": 176}
CONFIGS: dict[str, tuple[dict[str, Any], float]] = {
    "llama": (_SHARED, 1e-9),
    "qwen3": ({**_SHARED, "head_dim": 32}, 1e-2),  # heads wider than their share, with norms
    "gemma": ({**_SHARED, "head_dim": 16, "intermediate_size": 256}, 1e-9),  # a gate in an MLP of four times the width
    "falcon": (_SMALL, 1e-2),  # heads that share keys and values, all of them
    # GPT-2's biases are left out.
    "gpt2": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 128}, 0.02),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_gives_the_parameters_that_transformers_makes(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    small, within = CONFIGS[kind]
    config = transformers.AutoConfig.for_model(kind, **small)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert ModelShape.from_config(config).params == pytest.approx(counted, rel=within)
    for said in (config.to_dict(), {"model_type": kind, **small}):  # a file leaves out what is its type's default
        assert ModelShape.from_config(said) == ModelShape.from_config(config)
    assert advise(model, gpu="a100-80", gpus=1).shape.params == counted


_EXPERTS: dict[str, Any] = {**_SHARED, "hidden_size": 256, "num_experts_per_tok": 2, "num_hidden_layers": 3}
_LOW_RANK: dict[str, Any] = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 24, "qk_nope_head_dim": 16}
#: the config, how far off biases and norms of low rank leave the count, and the MLPs' width that a token goes through
MIXTURES: dict[str, tuple[str, dict[str, Any], float, int]] = {
    "mixtral": ("mixtral", {**_EXPERTS, "num_local_experts": 8}, 1e-9, 2 * 176),
    "qwen3": (
        "qwen3_moe",  # layers 0 and 2 of three are dense, and 176 wide
        {**_EXPERTS, "num_experts": 8, "moe_intermediate_size": 64, "decoder_sparse_step": 2, "mlp_only_layers": [2]},
        1e-3,
        (2 * 176 + 2 * 64) // 3,
    ),
    "deepseek": (
        "deepseek_v3",
        {
            **_EXPERTS,
            **_LOW_RANK,
            "num_key_value_heads": 4,
            "q_lora_rank": 48,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
        },
        1e-9,
        round((176 + 2 * 3 * 64) / 3),
    ),
    "gpt-oss": ("gpt_oss", {**_EXPERTS, "num_local_experts": 8, "head_dim": 64}, 1e-2, 2 * 176),
}


@pytest.mark.parametrize("case", MIXTURES)
def test_memory_counts_all_experts_and_flops_those_of_a_token(case: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind, small, within, wide = MIXTURES[case]
    config = transformers.AutoConfig.for_model(kind, **small)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    counted = sum(sizes.values())
    active = sum(size * (2 / 8 if ".experts." in name else 1) for name, size in sizes.items())
    shape = ModelShape.from_config(config)
    assert (shape.params, shape.active) == pytest.approx((counted, active), rel=within)
    assert shape.active < 0.9 * shape.params
    assert abs(shape.intermediate - wide) <= 1
    assert flops_per_token(shape) == 6 * shape.active + 12 * 3 * 256 * shape.seq_len
    for said in (config.to_dict(), {"model_type": kind, **small}):
        assert ModelShape.from_config(said) == shape
    found = advise(model, gpu="a100-80", gpus=1).shape
    assert (found.params, found.active) == pytest.approx((counted, active), rel=within)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({**_SMALL, "num_local_experts": 8}, "no mixture that is counted"),
        ({**_SMALL, "is_encoder_decoder": True}, "no dense decoder"),
        ({"hidden_size": 64, "num_hidden_layers": 2, "image_size": 224}, "no dense decoder"),
        (None, "config with nothing"),
    ],
)
def test_a_config_of_another_kind_is_refused(given: Any, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        ModelShape.from_config(given)


def test_the_guides_tables_are_those_of_the_code() -> None:
    page = text("docs/PARALLELISM_GUIDE.md")
    assert page == planner_pages.guide(page), "run: python -m benchmarks.planner_pages"
