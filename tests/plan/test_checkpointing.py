"""Activation checkpointing through the plan, on transformers models: same numbers, same names, all given back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from lightning_mp import Checkpointing, MixedPrecisionPlan
from support.language import Language, gpt2, llama, tokens
from support.models import weights
from support.oracles import plan_for
from support.running import fit, trainer

pytest.importorskip("transformers")

MODELS = {"gpt2": (gpt2, "GPT2Block"), "llama": (llama, "LlamaDecoderLayer")}
each_model = pytest.mark.parametrize("kind", MODELS)


class CountFlops(Language):
    """Counts the floating-point operations of each training step's forward and backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counter = FlopCounterMode(display=False)
        self.counter.__enter__()
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.counter.__exit__(None, None, None)
        self.flops = self.counter.get_total_flops()


@each_model
def test_full_recomputes_exactly_the_blocks_forward_and_selective_no_product(kind: str) -> None:
    build, block = MODELS[kind]

    def flops(checkpointing: Any) -> int:
        module = CountFlops(build(attn_implementation="eager"))
        plan = MixedPrecisionPlan("32-true", checkpointing=checkpointing)
        # torch stops recomputing once it has what the backward needs; without that the count is simply the forward's
        with set_checkpoint_early_stop(False):
            fit(module, data=tokens(), plugins=[plan], max_steps=1)
        return module.flops

    model = build(attn_implementation="eager")
    blocks = model.transformer.h if kind == "gpt2" else model.model.layers
    with FlopCounterMode(display=False) as counter:
        model(input_ids=next(iter(tokens()))[0])
    by_module = counter.get_flop_counts()
    prefix = f"{type(model).__name__}." + ("transformer.h" if kind == "gpt2" else "model.layers")
    forward = sum(sum(by_module[f"{prefix}.{index}"].values()) for index in range(len(blocks)))
    assert forward > 0
    assert flops(block) == flops(None) + forward
    assert flops(Checkpointing(modules=block, mode="selective")) == flops(None)


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


@pytest.mark.parametrize(("mode", "own"), [("bf16-mixed", False), ("16-mixed", False), ("bf16-true", True)])
def test_lora_under_checkpointing_trains(mode: str, own: bool) -> None:
    """Complaint 5 (open-unlearning 178): with frozen embeddings and no input gradients it would train nothing.

    Those that a user asks for are ``own``, and stay.
    """
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    module = Language(peft.get_peft_model(llama(), config))
    if own:
        module.model.enable_input_require_grads()
    before = weights(module)
    plan = plan_for(mode, checkpointing="LlamaDecoderLayer", pins={"lora_*": "fp32"})
    fit(module, data=tokens(), plugins=[plan], max_epochs=2)
    moved = {name for name, value in weights(module).items() if not torch.equal(value, before[name].to(value.dtype))}
    assert moved == {name for name, p in module.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in moved)
    embeddings = module.model.get_input_embeddings()
    assert len(embeddings._forward_hooks) == own  # the input gradients' hook went with the run
