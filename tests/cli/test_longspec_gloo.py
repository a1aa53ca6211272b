"""``experiment=longspec`` in two processes under ZeRO-1: what docs/how-to/lora.md claims, seen in real runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from support.deepspeed_json import WHOLE_FP16
from support.longspec import Experiment
from support.ranks import Ranks

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.gloo, pytest.mark.slow]

FP32, FP16 = torch.float32, torch.float16
SICK = "model._target_=support.longspec.Sick"
RUNS: dict[str, tuple[str, ...]] = {
    "fp16": ("experiment=longspec", "trainer.max_steps=16"),
    # a loss a hundred times as large: its gradients overflow at 65536, and their norm is far above 1
    "overflows": (
        "experiment=longspec",
        "trainer.max_steps=8",
        SICK,
        "+model.overflow_at=[1,2,4]",
        "+model.factor=100",
    ),
}


@pytest.fixture(scope="module")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank saw of each run."""
    folder = tmp_path_factory.mktemp("longspec")
    return {name: ranks.run(Experiment(arguments, folder / name)) for name, arguments in RUNS.items()}


def weights(run: dict[str, Any], *parts: str) -> dict[str, Tensor]:
    """The weights with one of ``parts`` in their names."""
    found = {name: weight for name, weight in run["end"].items() if any(part in name for part in parts)}
    assert found
    return found


def test_all_is_as_declared_and_only_the_adapters_are_trained(runs: dict[str, list[dict[str, Any]]]) -> None:
    for run in runs["fp16"]:
        assert run["audit"]["ok"], run["audit"]
        assert (run["processes"], run["stage"], run["fp16"]) == ((2, "gloo"), 1, WHOLE_FP16)
        assert all(math.isfinite(batch["loss"]) for batch in run["batches"])
        changed = {key for key, weight in run["end"].items() if not torch.equal(weight, run["start"][key])}
        assert changed == run["trained"] == set(weights(run, "lora_"))
        assert {weight.dtype for weight in weights(run, "norm", "lora_").values()} == {FP32}
        assert {weight.dtype for weight in weights(run, "lm_head", "embed_tokens", "base_layer").values()} == {FP16}
        norms = [seen for name, seen in run["dtypes"].items() if name.endswith("norm")]
        assert set().union(*norms) == {(FP16, FP32)}
        assert run["steps"][0]["masters"] == {FP32}


def test_a_step_that_overflows_on_one_rank_is_left_out_on_both(runs: dict[str, list[dict[str, Any]]]) -> None:
    for run in runs["overflows"]:
        ends = run["batches"][1::2]
        skipped = {step for step, end in enumerate(ends) if not math.isfinite(end["norm"])}
        assert {1, 2, 4} < skipped  # and the first, whose gradients are too large for fp16 at 65536
        assert (ends[-1]["applied"], ends[-1]["skipped"]) == (len(ends) - len(skipped), len(skipped))
        assert len(run["steps"]) == len(ends) - len(skipped)  # AdamW was not asked
        assert all(weight.isfinite().all() for weight in run["end"].values())


def test_micro_batches_are_accumulated_clipped_and_stepped_on_with_warm_up_and_cosine(
    runs: dict[str, list[dict[str, Any]]],
) -> None:
    highest, warm_up, steps = 5e-4, 10, 16
    rising = [highest * (0.1 + 0.9 * step / warm_up) for step in range(warm_up)]
    turns = [math.pi * step / (steps - warm_up) for step in range(steps - warm_up)]
    falling = [highest * (0.1 + 0.9 * (1 + math.cos(turn)) / 2) for turn in turns]
    run = runs["fp16"][0]
    assert [batch["applied"] for batch in run["batches"]] == [number // 2 for number in range(1, 33)]
    assert [step["lr"] for step in run["steps"]] == pytest.approx([*rising, *falling])
    large = runs["overflows"][0]
    norms = [batch["norm"] for batch in large["batches"][1::2] if math.isfinite(batch["norm"])]
    assert min(norms) > 10
    assert [step["norm"] for step in large["steps"]] == pytest.approx([1.0] * len(norms), rel=1e-5)
