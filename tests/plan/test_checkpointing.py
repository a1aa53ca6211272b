"""Activation checkpointing through the plan, on transformers models: same numbers, same names, all given back."""

from itertools import product
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from peft import PrefixTuningConfig, get_peft_model
from torch import nn
from transformers import DynamicCache

from lightning_mp import PlanError
from support import hf
from support.language import Language, gpt2, llama, tokens
from support.models import Regression, same_weights, weights
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


class Cached(LightningModule):
    """Gives a model a cache by hand, empty or filled by a forward without gradients, or has peft give it one."""

    def __init__(self, kind: str, how: str) -> None:
        super().__init__()
        self.model, self.how, self.losses = hf.MODELS[kind](), how, list[float]()
        if how == "prefix tuning":
            task = "SEQ_2_SEQ_LM" if kind == "t5" else "CAUSAL_LM"
            torch.manual_seed(0)
            self.model = get_peft_model(self.model, PrefixTuningConfig(task_type=task, num_virtual_tokens=3)).train()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        cache: dict[str, Any] = {}
        if self.how != "prefix tuning":
            cache["past_key_values"] = DynamicCache(config=self.model.config)
        if self.how == "filled":
            with torch.no_grad():
                self.model(input_ids=batch[:, :2], use_cache=True, **cache)
            batch = batch[:, 2:]
        loss = self.model(input_ids=batch, labels=batch, **cache).loss
        self.losses.append(loss.item())
        if self.how == "filled":
            assert cache["past_key_values"].get_seq_length() == 2 + batch.shape[1]
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)


BLOCKS = {"llama": "LlamaDecoderLayer", "gpt2": "GPT2Block", "t5": "T5Block"}


@pytest.mark.parametrize(
    ("kind", "how"),
    [*((kind, "prefix tuning") for kind in BLOCKS), *product(("llama", "gpt2"), ("empty", "filled"))],
)
def test_a_cache_that_a_model_is_given_is_as_it_was_in_the_recomputation(kind: str, how: str) -> None:
    plain, recomputed = Cached(kind, how), Cached(kind, how)
    fit(plain, data=hf.token_batches(), plugins=[plan_for("bf16-mixed")], max_steps=3)
    plan = plan_for("bf16-mixed", checkpointing=BLOCKS[kind])
    fit(recomputed, data=hf.token_batches(), plugins=[plan], max_steps=3)
    assert recomputed.losses == plain.losses
    assert same_weights(weights(recomputed), weights(plain))


class Remembers(nn.Module):
    """A block with a memory of its own kind, which each forward adds rows to."""

    def forward(self, x: torch.Tensor, memory: list[torch.Tensor]) -> torch.Tensor:
        memory.append(x)
        return (x.repeat(len(memory) * 2, 1) + torch.zeros(2 * len(x), 1)).tanh().exp()


def test_a_forward_that_changes_what_it_is_given_is_named_where_it_fails() -> None:
    class Changes(Regression):
        def loss(self, batch: Any) -> torch.Tensor:
            return self.block(self.net[0](batch[0]), []).mean()

    module = Changes()
    module.block = Remembers()
    with pytest.raises(PlanError, match=r"Checkpointing of a Remembers.*size.*Leave it out of checkpointing="):
        fit(module, plugins=[plan_for("32-true", checkpointing="block")])
