"""ActivationCheckpointing beside stock plugins (complaint 9, PL 1308): same numbers, fewer activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_mp import PlanError
from lightning_mp.callbacks import ActivationCheckpointing
from support.language import Language, gpt2, llama, tokens
from support.models import same_weights, weights
from support.oracles import stock_for
from support.running import fit

pytest.importorskip("transformers")


class Held(Language):
    """Counts the bytes the forward keeps for the backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.bytes = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            self.bytes += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_numbers_are_those_without_it_and_less_is_kept(mode: str) -> None:
    plain, checkpointed = Held(gpt2()), Held(gpt2())
    fit(plain, data=tokens(), **stock_for(mode))
    fit(checkpointed, data=tokens(), callbacks=[ActivationCheckpointing("GPT2Block")], **stock_for(mode))
    assert plain.losses == checkpointed.losses
    assert same_weights(weights(plain), weights(checkpointed))
    assert checkpointed.bytes < 0.5 * plain.bytes


@pytest.mark.parametrize("fail_at", [None, 2])
def test_use_cache_is_off_meanwhile_and_back_after_success_and_failure(fail_at: int | None) -> None:
    class Looks(Language):
        def on_train_start(self) -> None:
            self.met = self.model.config.use_cache

    module = Looks(llama(), fail_at=fail_at)
    arguments: dict[str, Any] = {"data": tokens(), "callbacks": [ActivationCheckpointing("LlamaDecoderLayer")]}
    if fail_at is None:
        fit(module, **arguments)
    else:
        with pytest.raises(KeyError, match="planned"):
            fit(module, **arguments)
    assert (module.met, module.model.config.use_cache) == (False, True)


def test_a_class_is_taken_as_well_as_its_name() -> None:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    assert ActivationCheckpointing(GPT2Block).config == ActivationCheckpointing("GPT2Block").config


@pytest.mark.parametrize(
    "arguments",
    [
        {"modules": "x", "every": 0},
        {"modules": "x", "mode": "half"},
        {"modules": "x", "save_ops": ["mm"]},
        {"modules": ()},
    ],
)
def test_bad_arguments_are_refused_when_written(arguments: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        ActivationCheckpointing(**arguments)


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(PlanError, match="'GPT2Block'"):
        fit(Language(gpt2()), data=tokens(), callbacks=[ActivationCheckpointing("GPT2Blok")])
