"""Reentrant checkpointing that trains nothing, and caches beside checkpointing: what is said is what happens."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from lightning_mp import MixedPrecisionPlan
from support import hf
from support.doctor import bert, found, net

BLOCKS = ("LlamaDecoderLayer", "GPT2Block")
NAME = "lora_checkpoint_no_input_grads"


def _enable(model: Any, **options: Any) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`gradient_checkpointing_enable` is deprecated", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options or None)


def _wrap(model: nn.Module, how: CheckpointImpl) -> None:
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=how),
        check_fn=lambda module: type(module).__name__ in BLOCKS,
    )


def _lora(build: Any, *, reentrant: bool, input_gradients: bool) -> Any:
    model = build(lora=True)
    model.config.use_cache = False
    _enable(model, use_reentrant=reentrant)
    for hooked in (model, model.base_model.model):
        hooked.disable_input_require_grads()
    if input_gradients:
        model.enable_input_require_grads()
    return model


def _gradients(model: nn.Module) -> int:
    """How many trained weights get a gradient."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True", UserWarning)
        loss = hf.loss_of(model, hf.tokens())
    if loss.requires_grad:
        loss.backward()
    return sum(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("build", [hf.llama, hf.gpt2])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("input_gradients", [True, False])
def test_lora_is_found_to_train_nothing_exactly_where_it_does(
    build: Any, reentrant: bool, input_gradients: bool
) -> None:
    model = _lora(build, reentrant=reentrant, input_gradients=input_gradients)
    findings = found(model, "bf16-mixed")
    trained = _gradients(model)
    assert (NAME in findings) == (trained == 0)
    if trained:
        assert findings == {}
    else:
        assert findings[NAME].severity == "error"
        assert "2 blocks" in findings[NAME].what
        assert "backward raises" in findings[NAME].why
        assert "enable_input_require_grads()" in findings[NAME].fix


@pytest.mark.parametrize("how", list(CheckpointImpl))
def test_torchs_wrapper_is_looked_through_as_well(how: CheckpointImpl) -> None:
    model = hf.llama(lora=True)
    model.config.use_cache = False
    model.base_model.model.disable_input_require_grads()
    _wrap(model, how)
    assert (NAME in found(model, "bf16-mixed")) == (_gradients(model) == 0) == (how is CheckpointImpl.REENTRANT)


def test_a_head_trained_beside_lora_is_all_that_learns() -> None:
    model = _lora(hf.llama, reentrant=True, input_gradients=False)
    model.get_output_embeddings().weight.requires_grad_(True)
    finding = found(model, "bf16-mixed")[NAME]
    assert "only base_model.model.lm_head.weight and what is behind do" in finding.why
    assert _gradients(model) == 1


def test_trained_embeddings_feed_the_blocks() -> None:
    model = _lora(hf.gpt2, reentrant=True, input_gradients=False)
    model.base_model.model.transformer.wpe.weight.requires_grad_(True)
    assert found(model, "bf16-mixed") == {}
    assert _gradients(model) == 5


def test_what_may_feed_the_blocks_from_outside_is_left_alone() -> None:
    class Seeing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language = _lora(hf.llama, reentrant=True, input_gradients=False)
            self.eyes = nn.Linear(8, 16)

    assert found(Seeing(), "32-true") == {}


def test_the_plans_own_checkpointing_trains_lora() -> None:
    model = hf.llama(lora=True)
    model.config.use_cache = False
    model.base_model.model.disable_input_require_grads()
    assert found(model, MixedPrecisionPlan("bf16-mixed", checkpointing="LlamaDecoderLayer")) == {}


def test_in_eval_mode_transformers_checkpoints_nothing() -> None:
    model = _lora(hf.llama, reentrant=True, input_gradients=False).eval()
    assert set(found(model, "bf16-mixed")) == {"eval_mode"}
    assert _gradients(model) == 8


# ------------------------------------------------------------------ use_cache


@pytest.mark.parametrize("build", [hf.llama, hf.gpt2])
def test_a_cache_beside_transformers_checkpointing(build: Any) -> None:
    model = build()
    _enable(model)
    finding = found(model, "bf16-mixed")["use_cache_while_checkpointing"]
    assert finding.severity == "warning"
    assert "use_cache = False" in finding.fix
    model.config.use_cache = False
    assert found(model, "bf16-mixed") == {}


def test_beside_torchs_reentrant_wrapper_a_cache_makes_gradients_wrong() -> None:
    plain, model = hf.llama(), hf.llama()
    _wrap(model, CheckpointImpl.REENTRANT)
    assert found(model, "32-true")["use_cache_while_checkpointing"].severity == "error"
    for each in (plain, model):
        each.get_input_embeddings().requires_grad_(True)
        hf.loss_of(each, hf.tokens()).backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert not all(torch.allclose(one.grad, other.grad, atol=1e-6) for one, other in pairs)


def test_a_plan_turns_it_off_itself() -> None:
    plan = MixedPrecisionPlan("bf16-mixed", checkpointing="LlamaDecoderLayer")
    assert found(hf.llama(), plan)["use_cache_while_checkpointing"].severity == "info"


@pytest.mark.parametrize("build", [hf.llama, bert, net])
def test_without_checkpointing_or_without_generation_a_cache_is_nobodys_business(build: Any) -> None:
    model = build()
    if build is bert:
        _enable(model)
    assert found(model, "bf16-mixed") == {}
