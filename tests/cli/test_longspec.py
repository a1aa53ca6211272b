"""LongSpec's recipe as YAML, and the LoRA of ``CausalLM``."""

from typing import Any

import pytest
import yaml

from lightning_mp.cli.train import run as train
from lightning_mp.demo.language_model import CausalLM
from lightning_mp.errors import PlanError
from support.deepspeed_json import WHOLE_FP16

TINY = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def shown(*arguments: str) -> dict[str, Any]:
    """The config that the command would run."""
    said: list[str] = []
    assert train(arguments, said.append, only_show=True) == 0
    return yaml.safe_load(said[0])


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
        ({"rank": 2}, ["unexpected keyword argument 'rank'"]),
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
