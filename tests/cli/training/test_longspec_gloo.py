"""``experiment=longspec`` in two processes under ZeRO-1: what is observed of the run, a test for each thing it claims.

docs/longspec.md has the claims, and the test that shows each.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support import launching
from support.deepspeed_json import WHOLE_FP16
from support.longspec import DeepSpeedAlone, Experiment
from support.ranks import Ranks

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.gloo, pytest.mark.slow]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
LONGSPEC = "experiment=longspec"
SICK = "model._target_=support.longspec.Sick"
#: the same run with nothing recomputed, and with everything in fp32
KEPT = ("plan.checkpointing=null",)
IN_FP32 = (
    "plan.precision=32-true",
    "plan.loss_scaling=null",
    "strategy.config=null",
    *(f"plan.pins.{name}=fp32" for name in ("lm_head", "embed_tokens", "base_layer")),
)
INJECTED = (1, 2, 4)
RUNS: dict[str, tuple[str, ...]] = {
    "fp16": (LONGSPEC, "trainer.max_steps=16"),
    "bf16": ("experiment=longspec_bf16", "trainer.max_steps=3"),
    "kept": (LONGSPEC, "trainer.max_steps=3", *KEPT),
    "fp32": (LONGSPEC, "trainer.max_steps=3", *IN_FP32),
    "fp32 kept": (LONGSPEC, "trainer.max_steps=3", *IN_FP32, *KEPT),
    # a loss a hundred times as large: its gradients overflow at 65536, and their norm is far above 1
    "overflows": (LONGSPEC, "trainer.max_steps=8", SICK, "+model.overflow_at=[1,2,4]", "+model.factor=100"),
    "exhausted": (
        LONGSPEC,
        "trainer.max_steps=30",
        "trainer.accumulate_grad_batches=1",
        SICK,
        f"+model.overflow_at={[*range(1, 30)]}",
    ),
    "unscaled": (
        LONGSPEC,
        "trainer.max_steps=1",
        "plan.loss_scaling.loss_scale=1",
        "strategy.config.fp16.loss_scale=1",
    ),
}
LORA = ("lora_A.default", "lora_B.default")
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
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


def of(table: dict[str, Any], *endings: str) -> list[Any]:
    """The entries of the modules whose names end so."""
    found = [entry for name, entry in table.items() if name.endswith(endings)]
    assert found
    return found


def taken_up(weights: dict[str, Tensor]) -> int:
    """Bytes."""
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


# ---------------------------------------------------------------------- the run as a whole


@pytest.mark.parametrize("experiment", ["longspec", "longspec_bf16"])
def test_the_command_runs_it(experiment: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "lightning_mp", "train", f"experiment={experiment}", "run_dir=out"]
    quick = ["trainer.max_steps=2", f"data.text={argparse.__file__}", "trainer.enable_progress_bar=false"]
    given = launching.environment(XDG_CACHE_HOME=tmp_path / "cache", PYTHONPATH=Path(__file__).resolve().parents[3])
    ended = launching.run([[*words, *quick, "trainer.accelerator=cpu"]], tmp_path / "log", [given], timeout=200)
    assert ended.codes == (0,), ended.output
    assert not ended.left
    out = tmp_path / "out"
    assert json.loads((out / "audit.json").read_text())["ok"]
    readings = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [reading["step"] for reading in readings if "train/loss" in reading] == [0, 1]
    assert (out / "checkpoints" / "last.ckpt").is_dir()
    said = [line.strip() for line in ended.output.splitlines()]
    assert said.count("tf32='high' changes nothing on CPU: it has no TF32") == 1


# ---------------------------------------------------------------------- TF32


def test_a_cpu_has_no_tf32_which_is_said_and_changes_nothing(runs: list[OfRank]) -> None:
    run = runs[0]["fp16"]
    assert run["audit"]["notes"] == ["tf32='high' changes nothing on CPU: it has no TF32"]
    assert run["switches"] == run["switches after"] == (False, True)  # torch's own


def test_no_product_is_left_in_fp32_for_tf32_to_speed_up(runs: list[OfRank]) -> None:
    assert set().union(*runs[0]["fp16"]["products"].values()) == {FP16}
    assert set().union(*runs[0]["fp32"]["products"].values()) == {FP32}


# ---------------------------------------------------------------------- fp16 under DeepSpeed


def test_the_engine_holds_the_fp16_block_key_for_key(runs: list[OfRank]) -> None:
    for rank in runs:
        assert rank["fp16"]["config"]["fp16"] == WHOLE_FP16


def test_it_is_zero_1_in_two_processes(runs: list[OfRank]) -> None:
    for rank in runs:
        run = rank["fp16"]
        assert run["config"]["stage"] == 1
        assert run["processes"] == (2, "gloo")
        trained = sum(weight.numel() for weight in weights(run, "lora_").values())
        assert {step["numbers"] for step in run["steps"]} == {trained / 2}  # each steps on its half


def test_products_and_attention_run_in_fp16_forward_and_backward(runs: list[OfRank]) -> None:
    products = runs[0]["fp16"]["products"]
    endings = tuple(f"{name}.{part}" for name in LINEAR for part in ("base_layer", *LORA))
    assert len(of(products, *endings)) == 2 * 7 * 3
    assert of(products, "lm_head", *endings, "self_attn") == [{FP16}] * (1 + 2 * 7 * 3 + 2)
    assert products[""] == {FP16}  # the backward pass


def test_the_loss_scale_starts_at_65536_and_keeps_gradients_from_underflowing(runs: list[OfRank]) -> None:
    least = torch.finfo(FP16).smallest_normal
    assert runs[0]["fp16"]["batches"][0]["scale"] == 65536
    shares = {}
    for name in ("fp16", "unscaled"):
        gradient = runs[0][name]["logits gradient"]
        assert gradient.dtype == FP16
        shares[name] = float((gradient.abs() < least).float().mean())  # subnormal: bits are lost
    assert shares["fp16"] < 0.01
    assert shares["unscaled"] > 0.99


@pytest.mark.parametrize("name", ["overflows", "exhausted"])
def test_the_scale_moves_as_deepspeeds_own_scaler_moves_it(name: str, runs: list[OfRank]) -> None:
    """DeepSpeed's ``DynamicLossScaler`` with the engine's block, told of the same overflows."""
    for rank in runs:
        run = rank[name]
        every = run["config"]["accumulation"]
        assert [end["scale"] for end in run["batches"][every - 1 :: every]] == run["theirs"]["scales"]
    assert len(set(run["theirs"]["scales"])) > 3
    assert ("already at minimum" in run["theirs"]["then"]) == (name == "exhausted")


def test_a_step_that_overflows_on_one_rank_is_left_out_on_both(runs: list[OfRank]) -> None:
    for rank in runs:
        ends = rank["overflows"]["batches"][1::2]
        norms = [end["norm"] for end in ends]
        skipped = {step for step, norm in enumerate(norms) if not math.isfinite(norm)}
        assert set(INJECTED) < skipped  # and the first, whose gradients are too large for fp16 at 65536
        assert (ends[-1]["applied"], ends[-1]["skipped"]) == (len(ends) - len(skipped), len(skipped))
        assert len(rank["overflows"]["steps"]) == len(ends) - len(skipped)  # AdamW was not asked
        assert all(weight.isfinite().all() for weight in rank["overflows"]["end"].values())


def test_the_scale_never_goes_below_1_and_an_overflow_there_ends_the_run(runs: list[OfRank]) -> None:
    for rank in runs:
        run = rank["exhausted"]
        scales = [batch["scale"] for batch in run["batches"]]
        assert scales == [65536.0, 65536.0, *(2.0**power for power in range(15, -1, -1))]
        assert "overflow at the minimum loss scale" in run["ended"]


def test_frozen_weights_take_half_the_memory_and_trained_ones_have_fp32_masters(runs: list[OfRank]) -> None:
    fp16, fp32 = runs[0]["fp16"], runs[0]["fp32"]
    halves = "base_layer", *HEADS
    assert 2 * taken_up(weights(fp16, *halves)) == taken_up(weights(fp32, *halves))
    assert {weight.dtype for weight in weights(fp16, "lora_").values()} == {FP32}
    assert fp16["gradients"] == fp16["state"] == fp16["steps"][0]["masters"] == {FP32}
    assert taken_up(fp16["end"]) < 0.56 * taken_up(fp32["end"])


def test_what_a_block_keeps_for_the_backward_pass_takes_half_the_memory(runs: list[OfRank]) -> None:
    """Recomputing, a block keeps its input; what is left in fp32 belongs to the last norm and the loss."""
    fp16, fp32 = (runs[0][name]["saved"] for name in ("fp16", "fp32"))
    rows, width = 4 * 64, 64
    states = (FP16, 2 * rows * width), (FP32, 4 * rows * width)
    assert [fp16.count(state) for state in states] == [2, 1]
    assert [fp32.count(state) for state in states] == [0, 3]
    whole16, whole32 = (total(runs[0][name]["saved"]) for name in ("kept", "fp32 kept"))
    logits = 4 * rows * 512  # of the loss: in fp32 in both
    assert (whole16 - logits) / (whole32 - logits) < 0.7  # norms, and what LoRA is given, are in fp32


def total(saved: list[tuple[torch.dtype, int]]) -> int:
    return sum(size for _, size in saved)


# ---------------------------------------------------------------------- formats by layer


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_norms_are_stored_and_computed_in_fp32(name: str, runs: list[OfRank]) -> None:
    run = runs[0][name]
    assert {weight.dtype for weight in weights(run, "norm").values()} == {FP32}
    assert of(run["others"], "norm") == [{FP32}] * 5
    half = FP16 if name == "fp16" else BF16
    assert of(run["dtypes"], "norm") == [{(half, FP32)}] * 5
    ((_, (given, out)),) = run["norms"].items()
    exact = given.double() / (given.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert float((out.double() - exact).abs().max() / exact.abs().max()) < 1e-6


def test_deepspeeds_own_engine_would_have_cast_the_norms(ranks: Ranks) -> None:
    assert {weight for name, weight in ranks.run(DeepSpeedAlone())[0].items() if "norm" in name} == {FP16}


def test_norms_in_fp32_cost_next_to_nothing(runs: list[OfRank]) -> None:
    run = runs[0]["fp16"]
    more = taken_up(weights(run, "norm")) / 2  # than in fp16
    assert more < 0.002 * taken_up(run["end"])


def test_no_loss_is_nan_or_infinite(runs: list[OfRank]) -> None:
    for name in ("fp16", "bf16", "overflows"):
        assert all(math.isfinite(batch["loss"]) for batch in runs[0][name]["batches"])


@pytest.mark.parametrize(("name", "half"), [("fp16", FP16), ("bf16", BF16)])
def test_the_head_and_the_embedding_are_in_the_compute_dtype(name: str, half: Any, runs: list[OfRank]) -> None:
    run = runs[0][name]
    assert {weight.dtype for weight in weights(run, *HEADS).values()} == {half}
    assert of(run["dtypes"], "lm_head") == [{(FP32, half)}]  # what the last norm gives
    assert of(run["dtypes"], "embed_tokens") == [{(torch.int64, half)}]
    assert of(run["products"], "lm_head") == [{half}]


def test_lora_is_in_bf16_where_the_compute_dtype_is(runs: list[OfRank]) -> None:
    run = runs[0]["bf16"]
    assert run["audit"]["ok"], run["audit"]
    assert {weight.dtype for weight in weights(run, "lora_", "base_layer").values()} == {BF16}
    assert run["gradients"] == run["state"] == run["steps"][0]["masters"] == {BF16}
    assert of(run["products"], *LORA, "base_layer") == [{BF16}] * (2 * 7 * 3)
    assert run["batches"][0]["scale"] is None
    assert run["config"]["fp16"]["enabled"] is False


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_only_the_adapters_are_trained(name: str, runs: list[OfRank]) -> None:
    run = runs[0][name]
    changed = {key for key, weight in run["end"].items() if not torch.equal(weight, run["start"][key])}
    assert changed == run["trained"] == set(weights(run, "lora_"))


# ---------------------------------------------------------------------- gradient checkpointing


def test_activations_of_every_block_are_recomputed_in_the_backward_pass(runs: list[OfRank]) -> None:
    for name, again in (("fp16", True), ("kept", False)):
        run = runs[0][name]
        batches = len(run["batches"])
        for module in [f"model.layers.{layer}.self_attn.q_proj.base_layer" for layer in (0, 1)]:
            assert run["calls"].get((module, "again"), 0) == (batches if again else 0)
        outside = [key for key in run["calls"] if key[1] == "again" and ".layers." not in key[0]]
        assert outside == []


def test_use_cache_is_off_while_it_trains_and_as_before_afterwards(runs: list[OfRank]) -> None:
    fp16, kept = runs[0]["fp16"], runs[0]["kept"]
    assert {batch["use_cache"] for batch in fp16["batches"]} == {False}
    assert fp16["cached"] is False  # the model returned no keys and values
    assert fp16["use_cache after"] is True
    assert kept["cached"] is True  # as it would have been


def test_recomputing_keeps_a_third_of_the_activations_at_most(runs: list[OfRank]) -> None:
    """A third of two blocks and the loss; of the blocks alone a twentieth."""
    saved, kept = (total(runs[0][name]["saved"]) for name in ("fp16", "kept"))
    assert saved < kept / 3
    rows = 4 * 64
    outside = 4 * rows * 512 + 4 * rows * 64  # the loss's logits and the last norm
    assert (saved - outside) < (kept - outside) / 20


def test_recomputing_changes_no_number(runs: list[OfRank]) -> None:
    fp16, kept = (runs[0][name]["batches"] for name in ("fp16", "kept"))
    assert [batch["loss"] for batch in fp16[:6]] == [batch["loss"] for batch in kept]


def test_recomputing_costs_the_blocks_forward_pass_again(runs: list[OfRank]) -> None:
    """Frozen weights have no gradient: of three passes' products two are left, so a third one weighs more."""
    flops, kept = (runs[0][name]["flops"] for name in ("fp16", "kept"))
    assert 1.4 < flops / kept < 1.5


# ---------------------------------------------------------------------- the step


def test_micro_batches_are_accumulated(runs: list[OfRank]) -> None:
    for rank in runs:
        run = rank["fp16"]
        assert run["config"]["accumulation"] == 2
        assert {batch["shape"] for batch in run["batches"]} == {(4, 65)}
        assert [batch["applied"] for batch in run["batches"]] == [number // 2 for number in range(1, 33)]
        assert len(run["steps"]) == 16


def test_it_is_adamw_with_its_betas(runs: list[OfRank]) -> None:
    run = runs[0]["fp16"]
    assert run["optimizer"] is torch.optim.AdamW
    assert {step["betas"] for step in run["steps"]} == {(0.9, 0.95)}


def test_the_rate_rises_to_5e_4_and_falls_along_a_cosine(runs: list[OfRank]) -> None:
    highest, warm_up, steps = 5e-4, 10, 16
    rising = [highest * (0.1 + 0.9 * step / warm_up) for step in range(warm_up)]
    turns = [math.pi * step / (steps - warm_up) for step in range(steps - warm_up)]
    falling = [highest * (0.1 + 0.9 * (1 + math.cos(turn)) / 2) for turn in turns]
    assert [step["lr"] for step in runs[0]["fp16"]["steps"]] == pytest.approx([*rising, *falling])


def test_gradients_are_clipped_to_a_norm_of_1(runs: list[OfRank]) -> None:
    large, small = runs[0]["overflows"], runs[0]["fp16"]
    norms = [batch["norm"] for batch in large["batches"][1::2] if math.isfinite(batch["norm"])]
    assert min(norms) > 10
    assert [step["norm"] for step in large["steps"]] == pytest.approx([1.0] * len(norms), rel=1e-5)
    before = [batch["norm"] for batch in small["batches"][1::2]]
    assert max(before) < 1
    assert [step["norm"] for step in small["steps"]] == pytest.approx(before, rel=1e-5)


def test_the_loss_falls(runs: list[OfRank]) -> None:
    """On the same batch, before the first step and after the last; random weights over 512 tokens: ln 512 = 6.24."""
    before, after = runs[0]["fp16"]["losses"]
    assert before == pytest.approx(math.log(512), abs=0.05)
    assert after < before - 0.01
