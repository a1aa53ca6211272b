"""What the Trainer decides in a DeepSpeed JSON, and where the two differ."""

from __future__ import annotations

from typing import Any

import pytest

from support.deepspeed_json import faults_of, the_fault, with_trainer


def test_the_trainer_fills_in_what_the_json_leaves_out() -> None:
    assert with_trainer({}) == {
        "gradient_clipping": 0.0,
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 1,
    }
    assert with_trainer({}, clip_norm=0.5, accumulate=4, world_size=8, micro_batch=2) == {
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 4,
        "train_micro_batch_size_per_gpu": 2,
    }


def test_clipping_that_stands_in_the_json_alone_is_taken() -> None:
    assert with_trainer({"gradient_clipping": 1.0})["gradient_clipping"] == 1.0


def test_a_whole_batch_alone_says_what_a_part_is() -> None:
    config = with_trainer({"train_batch_size": 256}, accumulate=4, world_size=8)
    assert config["train_micro_batch_size_per_gpu"] == 8
    assert config["train_batch_size"] == 256


TRAINER: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (
        {"gradient_clipping": 1.0},
        {"clip_norm": 0.5},
        ("gradient_clipping=1.0 in the JSON", "Trainer(gradient_clip_val=0.5)", "Write Trainer(gradient_clip_val=1.0)"),
    ),
    (
        {"gradient_accumulation_steps": 4},
        {},
        (
            "gradient_accumulation_steps=4 in the JSON",
            "Trainer(accumulate_grad_batches=1)",
            "Write Trainer(accumulate_grad_batches=4)",
        ),
    ),
    (
        {"train_micro_batch_size_per_gpu": 4},
        {"micro_batch": 8},
        ("train_micro_batch_size_per_gpu=4 in the JSON", "a dataloader with batch_size=8"),
    ),
    (
        {"train_batch_size": 100, "train_micro_batch_size_per_gpu": 4},
        {"accumulate": 2, "world_size": 8},
        ("train_batch_size=100 in the JSON", "4 a device x 2 accumulated x 8 devices = 64", "train_batch_size: 64"),
    ),
    ({"gradient_clipping": "1.0"}, {"clip_norm": 1.0}, ("gradient_clipping='1.0'", "Write it without quotes")),
    ({"train_batch_size": True}, {}, ("train_batch_size=True", "a whole number >= 1")),
]


@pytest.mark.parametrize(("user", "words", "shown"), TRAINER, ids=[f"{row[0]} {row[1]}" for row in TRAINER])
def test_what_the_trainer_says_otherwise_is_one_fault_with_both_values(
    user: dict[str, Any], words: dict[str, Any], shown: tuple[str, ...]
) -> None:
    fault = str(the_fault(lambda: with_trainer(user, **words)))
    assert all(part in fault for part in shown), fault


def test_every_contradiction_with_the_trainer_is_reported_at_once() -> None:
    user = {
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": 4,
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 100,
    }
    assert len(faults_of(lambda: with_trainer(user, clip_norm=0.5, accumulate=2, micro_batch=3))) == 4
