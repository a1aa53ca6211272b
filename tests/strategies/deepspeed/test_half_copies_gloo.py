"""Half copies under ZeRO-1 and 2: the host's bytes, and bit for bit the run that holds fp32 weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.comparing import of_training, same
from support.ranks import Ranks
from support.zero_halves import FAILURES, STRANGERS, Copied, Failed, NotTaken, Strangers

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.gloo

SMALL_BUCKETS = {"config": {"zero_optimization": {"reduce_bucket_size": 300, "allgather_bucket_size": 300}}}
SCATTERED = {"config": {"zero_optimization": {"contiguous_gradients": False}}}
#: by name: kind of module, ZeRO stage, mode, what else
RUNS: dict[str, tuple[Any, ...]] = {
    "llama": ("llama", "1"),
    "gpt2, stage 2": ("gpt2", "2"),
    "ties, a weight used twice, convolutions, attention": ("kinds", "1"),
    "the same, stage 2": ("kinds", "2"),
    "weights asked for no value": ("asking", "2"),
    "the same, recomputed": ("asking", "1", "16-mixed", {"checkpointing": "Asking"}),
    "fp16 with skips": ("skips", "1", "16-mixed"),
    "fp16 with skips, stage 2": ("skips", "2", "16-mixed"),
    "gradients accumulated": ("kinds", "1", "bf16-mixed", {"accumulate_grad_batches": 3}),
    "gradients accumulated, stage 2": ("kinds", "2", "bf16-mixed", {"accumulate_grad_batches": 3}),
    "a layer used in several recomputed blocks": (
        "shared",
        "1",
        "bf16-mixed",
        {"checkpointing": "_Twice"},
    ),
    "a group without a vector": ("grouped", "1"),
    "a hook on a gradient": ("hooked", "2"),
    "hooks on gradients, registered in the run": ("hooked late", "1"),
    "gradients larger than a bucket": ("kinds", "2", "bf16-mixed", SMALL_BUCKETS),
    "gradients where they are": ("kinds", "2", "bf16-mixed", SCATTERED),
}


@pytest.mark.parametrize("run", [pytest.param(run, id=name) for name, run in RUNS.items()])
def test_the_run_is_the_one_with_fp32_weights(ranks: Ranks, run: tuple[Any, ...]) -> None:
    for found in ranks.run(Copied(*run)):
        half, fp32 = found["half"], found["fp32"]
        assert half["copies"]
        assert not fp32["copies"]
        for what in ("losses", "weights", "masters", "state", "counts"):
            assert same(half[what], fp32[what]), what
        assert same(half["weights"], {**half["weights"], **half["masters"]})  # fp32 again when the run is over
        assert any((weight != weight.bfloat16()).any() for weight in half["weights"].values())
        assert half["held"] < fp32["held"]
        assert half["rates"][: len(fp32["rates"])] == fp32["rates"]


def test_the_norm_to_clip_by_is_summed_by_groups(ranks: Ranks) -> None:
    """One more group of fp32 sums."""
    for found in ranks.run(Copied("kinds", "2", "bf16-mixed", {"gradient_clip_val": 0.01})):
        half, fp32 = found["half"], found["fp32"]
        assert same(half["losses"][:2], fp32["losses"][:2])
        assert same(half["weights"], fp32["weights"], of_training("bf16-mixed", 1e-2))


@pytest.mark.parametrize("stage", ["1", "2"])
def test_bytes_are_the_hosts(ranks: Ranks, stage: str) -> None:
    """2 bytes an element that autocast alone computes with, 4 another."""
    for found in ranks.run(Copied("llama", stage)):
        for run, other in ((found["half"], found["fp32"]),):
            elements = {name: weight.numel() for name, weight in run["masters"].items()}
            halves = sum(elements[name] for name in run["copies"])
            assert run["held"] == 4 * sum(elements.values()) - 2 * halves
            assert run["gathered"] == other["gathered"] - 2 * halves


def test_who_takes_a_copy_for_the_weight_is_told(ranks: Ranks) -> None:
    for said in ranks.run(Strangers()):
        assert set(said) == set(STRANGERS)
        for way, message in said.items():
            assert "net.2.weight" in message, (way, message)
            assert "pins={'net.2': 'fp32'}" in message or "half_copies=False" in message, (way, message)


def test_a_module_that_deepspeed_does_not_take_is_as_before(ranks: Ranks) -> None:
    for found in ranks.run(NotTaken()):
        assert found["said"] == "of DeepSpeed's own"
        assert {type(parameter) for parameter in found["after"].values()} == {torch.nn.Parameter}
        assert all(torch.equal(found["after"][name], weight) for name, weight in found["before"].items())


@pytest.mark.parametrize(("stage", "how"), [("1", "an error"), ("2", "Ctrl-C"), ("2", "NaN")])
def test_weights_are_fp32_again_after_a_failure(ranks: Ranks, stage: str, how: str) -> None:
    for found in ranks.run(Failed(stage, how)):
        half, fp32 = found["half"], found["fp32"]
        assert half["said"] == fp32["said"] == ["SystemExit" if how == "Ctrl-C" else type(FAILURES[how]()).__name__]
        assert same(half["weights"], fp32["weights"])
        assert half["kinds"] == {torch.nn.Parameter}
        assert any((weight != weight.bfloat16()).any() for weight in half["weights"].values())


def test_where_another_rank_does_not_end_the_half_values_stay_and_a_warning_says_so(ranks: Ranks) -> None:
    for found in ranks.run(Failed("1", "an error", late=4.0)):
        said, warning = found["half"]["said"]
        assert said == "RuntimeError"
        assert "not all ranks ended soon after the failure" in warning
