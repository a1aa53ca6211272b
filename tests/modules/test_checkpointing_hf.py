"""Checkpointing on transformers models: caches off and on again, input gradients for LoRA on and off again."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mp import Checkpointing
from lightning_mp.errors import Faults
from lightning_mp.modules import checkpointing
from lightning_mp.modules.checkpointing import CheckpointedForward
from support.hf import gpt2, llama, loss_of, tokens

MAKE = {"llama": (llama, "LlamaDecoderLayer"), "gpt2": (gpt2, "*.h.*")}


def checkpoint(root: nn.Module, pattern: str, **options: Any) -> ExitStack:
    config, faults = Checkpointing(modules=pattern, **options), Faults()
    modules = checkpointing.select(root, config, faults)
    faults.raise_if_any()
    return checkpointing.apply(root, modules, config)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    loss_of(model, tokens()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", MAKE)
def test_gradients_are_those_of_the_plain_model(name: str, lora: bool, mode: Any) -> None:
    make, pattern = MAKE[name]
    model = make(lora=lora)
    expected = gradients(model)
    applied = checkpoint(model, pattern, mode=mode)
    found = gradients(model)
    assert found.keys() == expected.keys()
    assert expected
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    applied.close()
    assert sum(isinstance(module, CheckpointedForward) for module in model.modules()) == 0


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", MAKE)
def test_the_cache_is_off_while_checkpointing_and_then_as_it_was(name: str, lora: bool, before: bool) -> None:
    make, pattern = MAKE[name]
    model = make(lora=lora)
    model.config.use_cache = before
    applied = checkpoint(model, pattern)
    assert model.config.use_cache is False
    assert model(input_ids=tokens()).past_key_values is None
    applied.close()
    assert model.config.use_cache is before


@pytest.mark.parametrize("name", MAKE)
def test_frozen_embeddings_below_lora_hand_on_gradients_while_checkpointing(name: str) -> None:
    make, pattern = MAKE[name]
    model = make(lora=True)
    embeddings, ids = model.get_input_embeddings(), tokens()
    assert not embeddings(ids).requires_grad
    applied = checkpoint(model, pattern)
    assert embeddings(ids).requires_grad
    applied.close()
    assert not embeddings(ids).requires_grad
    assert not embeddings._forward_hooks


def test_a_users_own_input_gradients_survive_the_undo() -> None:
    model = llama(lora=True)
    model.enable_input_require_grads()
    checkpoint(model, "LlamaDecoderLayer").close()
    assert model.get_input_embeddings()(tokens()).requires_grad
