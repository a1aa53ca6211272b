"""``experiment=longspec`` in two processes under ZeRO-1: what docs/how-to/lora.md claims, seen in real runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.deepspeed_json import WHOLE_FP16
from support.longspec import Experiment
from support.ranks import Ranks

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.gloo, pytest.mark.slow]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
LONGSPEC = "experiment=longspec"
SICK = "model._target_=support.longspec.Sick"
INJECTED = (1, 2, 4)
RUNS: dict[str, tuple[str, ...]] = {
    "fp16": (LONGSPEC, "trainer.max_steps=16"),
    "bf16": ("experiment=longspec_bf16", "trainer.max_steps=3"),
    "kept": (LONGSPEC, "trainer.max_steps=3", "plan.checkpointing=null"),
    # a loss a hundred times as large: its gradients overflow at 65536, and their norm is far above 1
    "overflows": (LONGSPEC, "trainer.max_steps=8", SICK, "+model.overflow_at=[1,2,4]", "+model.factor=100"),
    "exhausted": (
        LONGSPEC,
        "trainer.max_steps=30",
        "trainer.accumulate_grad_batches=1",
        SICK,
        f"+model.overflow_at={[*range(1, 30)]}",
    ),
}
HEADS = ("lm_head", "embed_tokens")


class OfRank(dict[str, Any]):
    """What one rank saw of the runs of ``RUNS``, each made when it is first asked for."""

    def __init__(self, rank: int, ranks: Ranks, folder: Path) -> None:
        super().__init__()
        self.rank, self.ranks, self.folder = rank, ranks, folder

    def __missing__(self, name: str) -> Any:
        self[name] = self.ranks.run(Experiment(RUNS[name], self.folder / name))[self.rank]
        return self[name]


@pytest.fixture(scope="module")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[OfRank]:
    folder = tmp_path_factory.mktemp("longspec")
    return [OfRank(rank, ranks, folder) for rank in (0, 1)]


def weights(run: dict[str, Any], *parts: str, moment: str = "end") -> dict[str, Tensor]:
    """The weights with one of ``parts`` in their names."""
    found = {name: weight for name, weight in run[moment].items() if any(part in name for part in parts)}
    assert found
    return found


def dtypes(run: dict[str, Any], *parts: str) -> set[torch.dtype]:
    return {weight.dtype for weight in weights(run, *parts).values()}


def of(table: dict[str, Any], ending: str) -> set[Any]:
    """What the modules whose names end so have in the table, together."""
    return set().union(*(entry for name, entry in table.items() if name.endswith(ending)))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_all_is_as_declared_in_two_processes_of_zero_1(name: str, runs: list[OfRank]) -> None:
    for rank in runs:
        run = rank[name]
        assert run["audit"]["ok"], run["audit"]
        assert (run["processes"], run["stage"]) == ((2, "gloo"), 1)
        assert run["fp16"] == {**WHOLE_FP16, "enabled": name == "fp16"}
        trained = sum(weight.numel() for weight in weights(run, "lora_").values())
        assert {step["numbers"] for step in run["steps"]} == {trained / 2}  # each steps on its half
        assert all(math.isfinite(batch["loss"]) for batch in run["batches"])


def test_a_cpu_has_no_tf32_which_is_said_and_changes_nothing(runs: list[OfRank]) -> None:
    run = runs[0]["fp16"]
    assert run["audit"]["notes"] == ["tf32='high' changes nothing on CPU: it has no TF32"]
    assert run["switches"] == run["switches after"] == (False, True)  # torch's own


@pytest.mark.parametrize(("name", "half"), [("fp16", FP16), ("bf16", BF16)])
def test_norms_are_fp32_and_the_rest_is_in_the_compute_dtype(name: str, half: Any, runs: list[OfRank]) -> None:
    run = runs[0][name]
    assert dtypes(run, "norm") == {FP32}
    assert of(run["dtypes"], "norm") == {(half, FP32)}
    assert dtypes(run, *HEADS, "base_layer") == {half}
    assert of(run["dtypes"], "lm_head") == {(FP32, half)}  # what the last norm gives
    # in bf16 the adapters are in bf16 too, as LongSpec has them; in fp16 they have fp32 master weights
    adapters = BF16 if name == "bf16" else FP32
    assert dtypes(run, "lora_") == {adapters}
    assert run["gradients"] == run["state"] == run["steps"][0]["masters"] == {adapters}


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_only_the_adapters_are_trained(name: str, runs: list[OfRank]) -> None:
    run = runs[0][name]
    changed = {key for key, weight in run["end"].items() if not torch.equal(weight, run["start"][key])}
    assert changed == run["trained"] == set(weights(run, "lora_"))


@pytest.mark.parametrize("name", ["overflows", "exhausted"])
def test_the_scale_moves_as_deepspeeds_own_scaler_moves_it(name: str, runs: list[OfRank]) -> None:
    for rank in runs:
        run = rank[name]
        scales, then = run["theirs"]
        every = run["accumulation"]
        assert [end["scale"] for end in run["batches"][every - 1 :: every]] == scales
        assert len(set(scales)) > 3
        assert ("already at minimum" in then) == (name == "exhausted")
        assert ("overflow at the minimum loss scale" in run["ended"]) == (name == "exhausted")


def test_a_step_that_overflows_on_one_rank_is_left_out_on_both(runs: list[OfRank]) -> None:
    for rank in runs:
        run = rank["overflows"]
        ends = run["batches"][1::2]
        skipped = {step for step, end in enumerate(ends) if not math.isfinite(end["norm"])}
        assert set(INJECTED) < skipped  # and the first, whose gradients are too large for fp16 at 65536
        assert (ends[-1]["applied"], ends[-1]["skipped"]) == (len(ends) - len(skipped), len(skipped))
        assert len(run["steps"]) == len(ends) - len(skipped)  # AdamW was not asked
        assert all(weight.isfinite().all() for weight in run["end"].values())


def test_every_block_is_recomputed_without_a_cache_and_no_number_changes(runs: list[OfRank]) -> None:
    fp16, kept = runs[0]["fp16"], runs[0]["kept"]
    assert {name.split(".layers.")[1][0] for name in fp16["again"]} == {"0", "1"}
    assert kept["again"] == set()
    assert {batch["use_cache"] for batch in fp16["batches"]} == {False}
    assert fp16["use_cache after"] is True
    assert [batch["loss"] for batch in fp16["batches"][:6]] == [batch["loss"] for batch in kept["batches"]]


def test_micro_batches_are_accumulated_for_an_adamw_with_warm_up_and_cosine(runs: list[OfRank]) -> None:
    highest, warm_up, steps = 5e-4, 10, 16
    rising = [highest * (0.1 + 0.9 * step / warm_up) for step in range(warm_up)]
    turns = [math.pi * step / (steps - warm_up) for step in range(steps - warm_up)]
    falling = [highest * (0.1 + 0.9 * (1 + math.cos(turn)) / 2) for turn in turns]
    for rank in runs:
        run = rank["fp16"]
        assert {batch["shape"] for batch in run["batches"]} == {(4, 65)}
        assert [batch["applied"] for batch in run["batches"]] == [number // 2 for number in range(1, 33)]
        assert run["optimizer"] is torch.optim.AdamW
        assert {step["betas"] for step in run["steps"]} == {(0.9, 0.95)}
        assert [step["lr"] for step in run["steps"]] == pytest.approx([*rising, *falling])


def test_gradients_are_clipped_to_a_norm_of_1(runs: list[OfRank]) -> None:
    large, small = runs[0]["overflows"], runs[0]["fp16"]
    norms = [batch["norm"] for batch in large["batches"][1::2] if math.isfinite(batch["norm"])]
    assert min(norms) > 10
    assert [step["norm"] for step in large["steps"]] == pytest.approx([1.0] * len(norms), rel=1e-5)
    before = [batch["norm"] for batch in small["batches"][1::2]]
    assert max(before) < 1
    assert [step["norm"] for step in small["steps"]] == pytest.approx(before, rel=1e-5)
