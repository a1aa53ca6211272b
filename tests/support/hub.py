"""Consolidated weights as transformers takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_mp.checkpoints import consolidate
from support.models import same_weights
from support.saved import full_state


def check_in_transformers(checkpoint: Path, config: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Under ``model.``, a Llama's ``checkpoint`` is what from_pretrained loads, from memory and from ``folder``."""
    from transformers import LlamaForCausalLM

    state = torch.load(consolidate(checkpoint, folder / "w.bin", prefix="model."), weights_only=True)
    consolidate(checkpoint, folder / "hub" / "model.safetensors", prefix="model.")
    config.save_pretrained(folder / "hub")
    options: dict[str, Any] = {"output_loading_info": True, "dtype": torch.float32}
    for path, given in ((None, {"config": config, "state_dict": state}), (folder / "hub", {})):
        model, info = LlamaForCausalLM.from_pretrained(path, **given, **options)
        assert not any(info.values()), info
        assert same_weights(full_state(model), weights)
