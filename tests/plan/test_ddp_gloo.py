"""The plan under DDP, in two real processes: ranks agree on every step, and one rank's overflow is everybody's skip."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mp import NonFinite
from support.ddp import (
    STATIC,
    Accumulated,
    ByHand,
    EqualsStock,
    FailsOnOneRank,
    Overflow,
    Pinned,
    Reduced,
    Resumed,
    Saved,
    Scale,
    resume_plan,
)
from support.models import Regression, same_weights
from support.oracles import CALM_SCALE, MODES, SCALED
from support.ranks import RankError, Ranks
from support.running import fit
from support.saving import ResumableBatches, SaveAt
from support.sharded import BAD_RANK, Stopped, ddp
from support.traces import Trace

pytestmark = pytest.mark.gloo

BF16_LEAST, FP16_LEAST = 2.0**-133, 2.0**-24  # half of either is zero in its own dtype


@pytest.mark.parametrize("bad", [(2,), (0, 5)], ids=str)
@pytest.mark.parametrize("optimizer", ["fused", "momentum"])
@pytest.mark.parametrize("mode", MODES)
def test_one_rank_overflowing_alone_makes_both_skip(ranks: Ranks, mode: str, optimizer: str, bad: Any) -> None:
    """And the weights stay equal on both, and equal to those of a run without that step."""
    one, other = ranks.run(Overflow(mode, optimizer, bad))
    assert one["skipped"] == other["skipped"] == [step in bad for step in range(8)]
    assert same_weights(one["weights"], other["weights"])
    assert same_weights(one["weights"], one["clean"])
    assert not same_weights(one["weights"], one["start"])


@pytest.mark.parametrize("mode", SCALED)
def test_the_scale_is_the_same_on_both_ranks(ranks: Ranks, mode: str) -> None:
    one, other = ranks.run(Scale(mode))
    assert one == other
    assert one["scales"] == [256.0, 128.0, 128.0, 128.0, 64.0, 64.0, 64.0, 64.0]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "16-mixed"])
def test_without_a_skip_it_is_stock_ddp_bit_for_bit(ranks: Ranks, mode: str, accumulate: int) -> None:
    for result in ranks.run(EqualsStock(mode, accumulate)):
        assert result["stock"]["losses"] == result["ours"]["losses"]
        assert same_weights(result["stock"]["weights"], result["ours"]["weights"])


@pytest.mark.parametrize("batch", [0, 3, 6])
def test_an_overflow_in_an_unshared_micro_batch_reaches_everybody(ranks: Ranks, batch: int) -> None:
    one, other = ranks.run(Accumulated(batch))
    assert one["counts"] == other["counts"] == (1, 1)
    assert same_weights(one["weights"], other["weights"])
    start, first, second = one["at"]
    assert same_weights(start, first) == (batch < 4)
    assert same_weights(first, second) == (batch >= 4)


@pytest.mark.parametrize("how", ["gradient", "loss", "batch"])
@pytest.mark.parametrize("mode", MODES)
def test_the_error_names_the_guilty_rank_on_every_rank(ranks: Ranks, mode: str, how: str) -> None:
    """Gradients are summed, so all ranks see infinities; the one named is the one whose own were bad."""
    one, other = ranks.run(Stopped(mode, how, NonFinite(max_consecutive=3), ddp, {"loss_scaling": STATIC}))
    assert one == other
    assert one["rank"] == BAD_RANK
    assert one["step"] == 5  # three skips from step 2 on are allowed
    assert one["module"] == {"gradient": "net.3", "loss": "net.3", "batch": "net.0"}[how]
    assert f"step 5 on rank {BAD_RANK}" in one["message"]


@pytest.mark.parametrize("mode", MODES)
def test_pins_hold_under_ddp(ranks: Ranks, mode: str) -> None:
    stored = {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(mode, torch.float32)
    one, other = ranks.run(Pinned(mode))
    assert {name: weight.dtype for name, weight in one.items()} == {
        name: torch.float32 if name.startswith("net.1.") else stored for name in one
    }
    assert same_weights(one, other)


@pytest.mark.parametrize(
    ("reduced", "average"),
    [
        # Averaged in fp32, as declared: the mean of two equal numbers is that number.
        (Reduced("bf16-true", (BF16_LEAST, BF16_LEAST)), BF16_LEAST),
        (Reduced("16-true", (FP16_LEAST, FP16_LEAST)), FP16_LEAST),
        # Averaged in its own dtype it is lost, which shows that the numbers tell the two apart.
        (Reduced("bf16-true", (BF16_LEAST, BF16_LEAST), stock=True), 0.0),
        (Reduced("bf16-true", (BF16_LEAST, BF16_LEAST), "bf16"), 0.0),
        (Reduced("16-true", (FP16_LEAST, FP16_LEAST), "fp16"), 0.0),
        (Reduced("32-true", (1.0, 2.0**-9)), 0.5 + 2.0**-10),
        (Reduced("bf16-mixed", (1.0, 2.0**-9)), 0.5 + 2.0**-10),
        (Reduced("32-true", (1.0, 2.0**-9), "bf16"), 0.5),
        (Reduced("bf16-mixed", (1.0, 2.0**-9), "bf16"), 0.5),
    ],
    ids=lambda value: f"{value.mode} {value.reduce_dtype} {value.stock}" if isinstance(value, Reduced) else "",
)
def test_gradients_are_averaged_in_reduce_dtype(ranks: Ranks, reduced: Reduced, average: float) -> None:
    assert ranks.run(reduced) == [[average] * 4] * 2


@pytest.mark.parametrize(("which", "skips"), [("net", 1), ("other", 1), ("net other", 2)])
def test_manual_optimizers_skip_together_across_ranks(ranks: Ranks, which: str, skips: int) -> None:
    one, other = ranks.run(ByHand(which))
    assert one["scales"] == other["scales"] == [CALM_SCALE] * 3 + [CALM_SCALE / 2] * 5
    assert one["counts"] == other["counts"] == (16 - skips, skips)
    assert same_weights(one["weights"], other["weights"])
    before, after = one["each"][2], one["each"][3]
    stayed = {name.split(".")[0] for name in before if torch.equal(before[name], after[name])}
    assert stayed == set(which.split())


def test_ddp_goes_on_from_one_devices_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """Steps 1 and 2 were skipped there: the hysteresis is spent, the scale was halved once."""
    single, data = Trace(), ResumableBatches()
    callbacks, module = [single, SaveAt(tmp_path, 4)], Regression(overflow_at=(1, 2))
    fit(module, plugins=[resume_plan()], callbacks=callbacks, data=data, max_epochs=2)
    for result in ranks.run(Resumed(tmp_path / "4.ckpt")):
        assert result["counts"] == (14, 2)
        assert result["scales"] == single.scales[4:]


def test_one_device_goes_on_from_ddps_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    before = ranks.run(Saved(tmp_path))[0]
    plan, trace, data = resume_plan(), Trace(), ResumableBatches()
    fit(Regression(), plugins=[plan], callbacks=[trace], ckpt_path=tmp_path / "4.ckpt", data=data)
    assert (plan.applied_steps, plan.skipped_steps) == (6, 2)
    assert trace.scales == before[4:]


def test_a_failing_rank_ends_the_run_quickly(ranks: Ranks) -> None:
    ranks.run(Pinned("32-true"))  # they have started
    start = time.monotonic()
    with pytest.raises(RankError, match="KeyError: 'planned'"):
        ranks.run(FailsOnOneRank())
    assert time.monotonic() - start < 45
