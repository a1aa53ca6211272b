"""The words for a precision: those of Lightning's Trainer mean what they mean there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.connector import _convert_precision_to_unified_args
from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT_STR_ALIAS_CONVERSION

from lightning_mp import MixedPrecisionPlan, PrecisionPolicy
from lightning_mp.policy import precision_word

WORDS: dict[str, tuple[Any, ...]] = {
    "16-mixed": (16, "16", "fp16", "float16", "half", torch.float16, "FP16", "Half", "16_mixed", " 16-mixed "),
    "bf16-mixed": ("bf16", "bfloat16", torch.bfloat16, "BF16", "bfloat16-mixed", "bf16_mixed"),
    "32-true": (32, "32", "fp32", "float32", "float", torch.float32, "fp32-true", "32_true"),
    "bf16-true": ("bf16_true", "bfloat16-true", "BF16-True"),
    "16-true": ("fp16-true", "16_true", "half-true"),
    "fp8-mixed": ("fp8", "float8", "FP8", "fp8_mixed", "float8-mixed"),
    "auto": ("AUTO",),
}


@pytest.mark.parametrize(("word", "means"), [(word, mode) for mode, words in WORDS.items() for word in words], ids=str)
def test_a_word_means_one_precision_wherever_it_is_written(word: Any, means: str) -> None:
    assert MixedPrecisionPlan(word).policy == PrecisionPolicy(precision=means)
    assert MixedPrecisionPlan(precision=word).precision == means
    assert MixedPrecisionPlan.from_config({"precision": word}).policy == PrecisionPolicy(precision=means)


@pytest.mark.filterwarnings("ignore:.*is supported for historical reasons")
@pytest.mark.parametrize("word", [word for word in _PRECISION_INPUT_STR_ALIAS_CONVERSION if "64" not in word])
def test_lightnings_own_words_mean_what_they_mean_to_its_trainer(word: str) -> None:
    lightning = _convert_precision_to_unified_args(word)  # type: ignore[arg-type]
    assert precision_word(word) == lightning


@pytest.mark.parametrize(
    "other", ["64", "64-true", "fp8-true", "tf32", "mixed", "", None, True, 16.0, [16], "32-mixed", "auto-mixed"]
)
def test_other_words_mean_none(other: Any) -> None:
    assert precision_word(other) is None
