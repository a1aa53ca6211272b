"""Checkpointing on transformers models: caches off and on again, input gradients for LoRA on and off again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lightning_mp import Checkpointing
from lightning_mp.errors import Faults
from lightning_mp.modules import checkpointing
from lightning_mp.modules.checkpointing import CheckpointedForward
from support.hf import gpt2, llama, loss_of, tokens

MAKE = {"llama": (llama, "LlamaDecoderLayer"), "gpt2": (gpt2, "*.h.*")}


def checkpoint(root: nn.Module, pattern: str, **options: Any) -> checkpointing.Applied:
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
    applied.undo()
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
    applied.undo()
    assert model.config.use_cache is before


@pytest.mark.parametrize("name", MAKE)
def test_frozen_embeddings_below_lora_hand_on_gradients_while_checkpointing(name: str) -> None:
    make, pattern = MAKE[name]
    model = make(lora=True)
    embeddings, ids = model.get_input_embeddings(), tokens()
    assert not embeddings(ids).requires_grad
    applied = checkpoint(model, pattern)
    assert embeddings(ids).requires_grad
    applied.undo()
    assert not embeddings(ids).requires_grad
    assert not embeddings._forward_hooks


def test_a_users_own_input_gradients_survive_the_undo() -> None:
    model = llama(lora=True)
    model.enable_input_require_grads()
    checkpoint(model, "LlamaDecoderLayer").undo()
    assert model.get_input_embeddings()(tokens()).requires_grad


_BLOCK = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
_IMAGE, _SMALL = {"image_size": 8, "patch_size": 4}, {"image_size": 16, "patch_size": 2}
#: models of images and of sound: class, configuration, what is checkpointed
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "CLIPVision": ("CLIPEncoderLayer", {**_BLOCK, **_IMAGE}),
    "Dinov2": ("Dinov2Layer", {**_BLOCK, **_IMAGE, "mlp_ratio": 1}),
    "Swin": ("SwinLayer", {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 1], "window_size": 2, **_SMALL}),
    "ConvNext": ("ConvNextLayer", {"hidden_sizes": [4, 8], "depths": [1, 1], "num_stages": 2, "patch_size": 2}),
    "ResNet": ("ResNetBasicLayer", {"embedding_size": 4, "hidden_sizes": [4], "depths": [1], "layer_type": "basic"}),
    "Wav2Vec2": ("Wav2Vec2EncoderLayer", {**_BLOCK, "conv_dim": [8], "conv_stride": [2], "conv_kernel": [4],
                 "num_feat_extract_layers": 1, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 1}),
}  # fmt: skip


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_models_of_images_and_of_sound(name: str, frozen: bool) -> None:
    pattern, settings = OTHERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**settings)).eval()
    trained = [module for module in model.modules() if type(module).__name__ == pattern]
    if frozen:
        model.requires_grad_(False)
        trained[-1].requires_grad_(True)
    size = {"ConvNext": 32, "ResNet": 32, "Swin": 16}.get(name, 8)
    given = torch.randn(2, 64) if name == "Wav2Vec2" else torch.randn(2, 3, size, size)

    def found() -> list[torch.Tensor]:
        model.zero_grad()
        model(given).last_hidden_state.pow(2).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = found()
    applied = checkpoint(model, pattern)
    assert all(map(torch.equal, found(), expected))
    applied.undo()
    assert not any(isinstance(module, CheckpointedForward) for module in model.modules())
