"""The guard under Lightning's own distributed strategies: one rank's fault is everybody's skip, and is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.comparing import of_training, same
from support.guarded import GUILTY, HOSTS, AtStage0, Guarded, Rewound
from support.models import same_weights
from support.nonfinite import BAD, FAULTS
from support.ranks import Ranks

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

PASSING = [how for how in FAULTS if how != "weight"]
ZERO = ("zero1", "zero2", "zero3")
CASES = [
    *((host, mode, how) for host in ("ddp", "fsdp2") for mode in ("32-true", "16-mixed") for how in PASSING),
    *((host, "bf16-mixed", how) for host in ("ddp", "fsdp2") for how in ("gradient", "infinite loss")),
    *(("fsdp1", "32-true", how) for how in PASSING),
    *((host, "32-true", how) for host in ZERO for how in PASSING),
    *((host, "bf16-mixed", how) for host in ZERO for how in ("gradient", "infinite loss")),
    *((host, "16-mixed", how) for host in ZERO for how in ("gradient", "batch")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guard")


def _ordinary(mode: str, how: str) -> bool:
    return mode == "16-mixed" and how == "gradient"


@pytest.mark.parametrize(("host", "mode", "how"), CASES)
def test_both_ranks_skip_and_name_the_guilty_one(ranks: Ranks, folder: Path, host: str, mode: str, how: str) -> None:
    one, other = ranks.run(Guarded(host, mode, how, folder))
    assert one["events"] == other["events"]
    (event,) = one["events"]
    module, _, bad_loss = FAULTS[how]
    seen = bad_loss or host != "zero3"  # ZeRO-3's backward is DeepSpeed's alone
    assert (event["rank"], event["module"]) == ((GUILTY, module) if seen else (None, None))
    assert event["step"] == BAD
    assert event["kind"] == ("nonfinite_loss" if bad_loss else "nonfinite_grad")
    assert event["severity"] == ("info" if _ordinary(mode, how) else "warning")
    assert one["counts"] == other["counts"] == (1, 7)


@pytest.mark.parametrize(("host", "mode", "how"), CASES)
def test_weights_are_those_of_a_run_without_the_batch(
    ranks: Ranks, folder: Path, host: str, mode: str, how: str
) -> None:
    one, other = ranks.run(Guarded(host, mode, how, folder))
    for result in (one, other):
        # another scale rounds fp16 otherwise
        assert same(result["weights"], result["clean"], of_training(mode, 1e-3) if mode == "16-mixed" else 0.0)


@pytest.mark.parametrize(("host", "mode", "how"), CASES)
def test_the_guilty_rank_saves_its_batch(ranks: Ranks, folder: Path, host: str, mode: str, how: str) -> None:
    guarded = Guarded(host, mode, how, folder)
    files = ranks.run(guarded)[1]["files"]
    if _ordinary(mode, how):
        assert files == []
        return
    known = FAULTS[how][2] or host != "zero3"
    assert files == [f"step_000003_rank{rank}.pt" for rank in (0, 1) if rank == GUILTY or not known]
    saved = torch.load(guarded.run_dir / "nonfinite" / files[-1], weights_only=True)
    assert (saved["rank"], saved["batch_idx"]) == (GUILTY, BAD)


@pytest.mark.parametrize("host", ["ddp", "zero2"])
def test_the_budget_stops_every_rank_with_the_same_error(ranks: Ranks, folder: Path, host: str) -> None:
    one, other = ranks.run(Guarded(host, "32-true", "loss", folder, (3, 4, 5), {"max_consecutive": 2}))
    assert one["error"] == other["error"] == (GUILTY, 5, "net.4")


@pytest.mark.parametrize("host", ["ddp", "fsdp2", "zero2"])
def test_in_a_window_of_four_the_bad_batch_is_named(ranks: Ranks, folder: Path, host: str) -> None:
    windows = {"accumulate_grad_batches": 4}
    one, other = ranks.run(Guarded(host, "32-true", "batch", folder, (5,), options=windows))
    assert one["counts"] == other["counts"] == (1, 1)
    (event,) = one["events"]
    assert (event["rank"], event["module"], event["evidence"]["batch_idx"]) == (GUILTY, "net.0", 5)


@pytest.mark.parametrize("planned", [False, True], ids=["guard", "plan"])
@pytest.mark.parametrize("host", HOSTS)
def test_a_rewind_brings_every_rank_back(ranks: Ranks, tmp_path: Path, host: str, planned: bool) -> None:
    for result in ranks.run(Rewound(host, tmp_path, planned)):
        kept = result["kept"]
        assert result["events"] == ["rewind"]
        assert result["batches"] == 8
        assert same_weights(kept[6], kept[4])
        assert not same_weights(kept[5], kept[4])
        assert not same_weights(kept[8], kept[6])
        assert result["files"] == ["step_000005_rank1.pt"]


def test_deepspeed_without_zero_is_guarded_in_fp32_and_refused_in_half_precision(ranks: Ranks, tmp_path: Path) -> None:
    """There gradients are in no place where anybody could look at them before DeepSpeed steps."""
    for said, events in ranks.run(AtStage0("32-true", tmp_path)):
        assert (said, events) == ("not refused", [(BAD, GUILTY, "net.2")])
    for said, _ in ranks.run(AtStage0("bf16-mixed", tmp_path)):
        assert "whose gradients only DeepSpeed sees" in said
