"""Activation checkpointing through the plan, on transformers models: same numbers, same names, all given back."""

import pytest
import torch

from support.language import Language, gpt2, llama, tokens
from support.models import weights
from support.oracles import plan_for
from support.running import fit, trainer

pytest.importorskip("transformers")

MODELS = {"gpt2": (gpt2, "GPT2Block"), "llama": (llama, "LlamaDecoderLayer")}
each_model = pytest.mark.parametrize("kind", MODELS)


@each_model
@pytest.mark.parametrize("fail_at", [None, 1])
def test_use_cache_is_off_meanwhile_and_back_afterwards(kind: str, fail_at: int | None) -> None:
    build, block = MODELS[kind]

    class Looks(Language):
        def on_train_start(self) -> None:
            self.met = self.model.config.use_cache

    module = Looks(build(), fail_at=fail_at)
    assert module.model.config.use_cache is True
    classes = [type(m) for m in module.modules()]
    runner = trainer(plugins=[plan_for("bf16-mixed", checkpointing=block)])
    if fail_at is None:
        runner.fit(module, tokens())
    else:
        with pytest.raises(KeyError, match="planned"):
            runner.fit(module, tokens())
    assert module.met is False
    assert module.model.config.use_cache is True
    assert [type(m) for m in module.modules()] == classes


@pytest.mark.parametrize("mode", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_lora_under_checkpointing_trains(mode: str) -> None:
    """Complaint 5 (open-unlearning 178): with frozen embeddings a reentrant form would train nothing."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    module = Language(peft.get_peft_model(llama(), config))
    before = weights(module)
    plan = plan_for(mode, checkpointing="LlamaDecoderLayer", pins={"lora_*": "fp32"})
    fit(module, data=tokens(), plugins=[plan], max_epochs=2)
    moved = {name for name, value in weights(module).items() if not torch.equal(value, before[name].to(value.dtype))}
    assert moved == {name for name, p in module.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in moved)
