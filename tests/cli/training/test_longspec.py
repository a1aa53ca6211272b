"""LongSpec's recipe as YAML, the LoRA of ``CausalLM``, and what of the recipe shows without a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra.utils import instantiate
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_mp import LossScaling, MixedPrecisionPlan
from lightning_mp.cli.training.application import train
from lightning_mp.demo.language_model import CausalLM
from lightning_mp.errors import MissingExtraError, PlanError
from lightning_mp.numerics.loss_scale import adjust, init
from support.deepspeed_json import RULE, WHOLE_FP16
from support.longspec import Experiment
from support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "longspec.md"
TINY = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def shown(*arguments: str) -> dict[str, Any]:
    """The config that the command would run."""
    said: list[str] = []
    assert train(arguments, said.append, only_show=True) == 0
    return yaml.safe_load(said[0])


def differences(one: Any, other: Any, path: str = "") -> set[str]:
    """The dotted keys that differ."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return set() if one == other else {path.removeprefix(".")}
    keys = one.keys() | other.keys()
    return set().union(*(differences(one.get(key), other.get(key), f"{path}.{key}") for key in keys))


# ---------------------------------------------------------------------- the YAML


def test_the_yaml_says_the_recipe() -> None:
    config = shown("experiment=longspec")
    assert config["plan"]["tf32"] == "high"
    assert config["strategy"]["name"] == "deepspeed_zero1"
    assert config["strategy"]["config"]["fp16"] == WHOLE_FP16
    assert next(iter(config["plan"]["pins"].items())) == ("*norm*", "fp32")
    assert config["plan"]["checkpointing"] == "*.layers.*"
    assert config["model"]["config"]["use_cache"] is True  # which the plan's checkpointing turns off
    assert (config["model"]["lr"], config["model"]["betas"]) == (5e-4, [0.9, 0.95])
    assert config["trainer"]["accelerator"] == "auto"
    assert (config["trainer"]["accumulate_grad_batches"], config["trainer"]["gradient_clip_val"]) == (2, 1.0)


def test_in_bf16_formats_differ_and_nothing_else() -> None:
    changed = differences(shown("experiment=longspec", "run_dir=x"), shown("experiment=longspec_bf16", "run_dir=x"))
    formats = {f"pins.{name}" for name in ("lm_head", "embed_tokens", "base_layer", "lora_*")}
    for owner in ("plan", "strategy.plan"):
        expected = {f"{owner}.{key}" for key in ("precision", "loss_scaling", *formats)}
        assert {key for key in changed if key.startswith(f"{owner}.")} == expected
        changed -= expected
    assert changed == {"strategy.config.fp16.enabled"}


def test_on_gpus_the_size_differs_and_nothing_else() -> None:
    given = "experiment=longspec", "run_dir=x"
    large = shown(*given, "model=llama_lora_1b", "data=library_text_long", "trainer.devices=8")
    assert differences(shown(*given), large) == {
        *(f"model.config.{key}" for key in ("hidden_size", "intermediate_size", "num_hidden_layers")),
        *(f"model.config.{key}" for key in ("num_attention_heads", "num_key_value_heads")),
        "model.config.vocab_size",
        "model.config.max_position_embeddings",
        "data.vocab",
        "data.context",
        "data.num_workers",
        "trainer.devices",
    }
    with torch.device("meta"):
        model = instantiate(large["model"])
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(1e9, rel=0.1)
    assert sum(weight.numel() for weight in model.parameters() if weight.requires_grad) < 1e7


def test_the_scale_doubles_after_1000_clean_steps() -> None:
    """As DeepSpeed's, one step more before the first growth; tests/numerics/test_loss_scale.py compares the two."""
    window = 1000
    config = LossScaling.deepspeed(**RULE)
    state, scales = init(config), []
    for _ in range(2 * window + 2):
        state = adjust(config, state, False)
        scales.append(state.scale)
    assert scales == [65536.0] * window + [131072.0] * window + [262144.0] * 2


# ---------------------------------------------------------------------- what shows without a run


def _flops(recompute: bool) -> int:
    """Of a step's products, all weights trained."""
    config = shown("experiment=longspec", *(() if recompute else ("plan.checkpointing=null",)))
    config["model"]["lora"] = None
    del config["plan"]["pins"]["base_layer"]
    module, plan = instantiate(config["model"], _convert_="all"), MixedPrecisionPlan.from_config(config["plan"])
    plan.convert_module(module)
    batch = torch.randint(512, (4, 65), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as flops:
        with plan.forward_context():
            loss = module.training_step(batch, 0)
        loss.backward()
    plan.teardown()
    return flops.get_total_flops()


def _more_by_recomputing(config: dict[str, Any]) -> float:
    """The same of any size, from the shapes: a block's products once more, but the last, whose result nobody needs."""
    width, inner, layers = (config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    heads = config["num_attention_heads"]
    keys = width * config.get("num_key_value_heads", heads) // heads
    block = width * (2 * width + 2 * keys + 3 * inner)
    return layers * (block - width * inner) / (3 * (layers * block + width * config["vocab_size"]))


def test_recomputing_costs_20_to_30_percent_more_products_where_all_weights_are_trained() -> None:
    tiny = shown("experiment=longspec")["model"]["config"]
    assert _flops(recompute=True) / _flops(recompute=False) - 1 == pytest.approx(_more_by_recomputing(tiny), abs=1e-6)
    large = shown("experiment=longspec", "model=llama_lora_1b", "data=library_text_long")["model"]["config"]
    assert _more_by_recomputing(large) == pytest.approx(0.24, abs=0.005)


def test_a_norm_in_fp32_is_right_where_fp16_overflows() -> None:
    """300 squared is more than fp16 holds."""
    config = shown("experiment=longspec")
    module = instantiate(config["model"], _convert_="all")
    MixedPrecisionPlan.from_config(config["plan"]).convert_module(module)
    x = torch.full((1, 64), 300.0, dtype=torch.float16)
    norm = next(child for name, child in module.named_modules() if name.endswith("input_layernorm"))
    assert torch.allclose(norm(x), torch.ones(1, 64))
    in_half = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert in_half.eq(0).all()  # all that was there is lost


# ---------------------------------------------------------------------- a run


@pytest.mark.gloo
@pytest.mark.slow
def test_the_experiment_runs_and_all_is_as_declared(tmp_path: Path) -> None:
    """Three steps in two processes; test_longspec_gloo.py looks at the rest."""
    pytest.importorskip("deepspeed")
    experiment = Experiment(("experiment=longspec", "trainer.max_steps=3"), tmp_path / "fp16")
    for run in run_ranks(experiment):
        assert run["audit"]["ok"], run["audit"]
        assert run["processes"] == (2, "gloo")
        assert run["config"]["fp16"] == WHOLE_FP16
        dtypes = {name: weight.dtype for name, weight in run["end"].items()}
        assert {dtype for name, dtype in dtypes.items() if "norm" in name} == {torch.float32}
        halves = "base_layer", "lm_head", "embed_tokens"
        assert {dtype for name, dtype in dtypes.items() if any(half in name for half in halves)} == {torch.float16}
        assert [batch["applied"] for batch in run["batches"]] == [0, 1, 1, 2, 2, 3]
        assert run["losses"][1] < run["losses"][0]


# ---------------------------------------------------------------------- LoRA by CausalLM


def test_lora_freezes_all_but_the_adapters() -> None:
    module = CausalLM("llama", TINY, lora={"r": 2, "target_modules": ["q_proj"]})
    trained = {name for name, weight in module.named_parameters() if weight.requires_grad}
    assert len(trained) == 2
    assert all("q_proj.lora_" in name for name in trained)
    assert module.model.peft_config["default"].task_type == "CAUSAL_LM"
    assert all(weight.requires_grad for weight in CausalLM("llama", TINY).parameters())


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"rank": 2}, ["unknown key lora.rank", "'rank_pattern'"]),
        ({"r": 2, "target_module": ["q_proj"], "lora_alph": 4}, ["'target_modules'", "'lora_alpha'"]),
        ({"r": 0, "target_modules": ["q_proj"]}, ["'r': 0", "positive"]),
        ({"r": 2, "target_modules": ["query"]}, ["query", "not found in the base model"]),
        ({"r": 2, "target_modules": ["q_proj"], "bias": "some"}, ["'bias': 'some'"]),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_lora_fields_that_peft_lacks_or_refuses_are_one_error(lora: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        CausalLM("llama", TINY, lora=lora)
    assert str(error.value).startswith("CausalLM: ")
    assert all(word in str(error.value) for word in words), str(error.value)


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"needs peft\. Install it: pip install 'lightning-mp\[hf\]'"):
        CausalLM("llama", TINY, lora={"r": 2})
    assert isinstance(CausalLM("llama", TINY).model, nn.Module)


# ---------------------------------------------------------------------- the page


def test_the_page_names_every_test_of_the_run_and_no_other() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8")))
    files = (*Path(__file__).parent.glob("test_longspec*.py"), ROOT / "tests/gpu/test_longspec_gpu.py")
    written = {
        file: set(re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)) for file in files
    }
    assert named <= set().union(*written.values())
    assert set().union(*(tests for file, tests in written.items() if file.stem != "test_longspec")) <= named
