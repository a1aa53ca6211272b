"""One rank's fault is everybody's skip, and is named: of the guard, and of a replay alone under every strategy."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support.comparing import of_training, same
from support.guarded import GUILTY, HOSTS, Guarded, NoFolder, Replayed, Rewound, UnderDeepSpeed
from support.models import same_weights
from support.nonfinite import BAD, FAULTS
from support.ranks import Ranks

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

PASSING = [how for how in FAULTS if how != "weight"]
CASES = [
    *(("ddp", "32-true", how) for how in PASSING),
    *((host, "32-true", "gradient") for host in ("fsdp2", "fsdp1")),
    ("ddp", "16-mixed", "gradient"),
    ("fsdp2", "16-mixed", "loss"),
    ("fsdp2", "bf16-mixed", "infinite loss"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guard")


@pytest.mark.parametrize(("host", "mode", "how"), CASES)
def test_both_ranks_skip_name_the_guilty_one_and_save_its_batch(
    ranks: Ranks, folder: Path, host: str, mode: str, how: str
) -> None:
    guarded, ordinary = Guarded(host, mode, how, folder), mode == "16-mixed" and how == "gradient"
    one, other = ranks.run(guarded)
    assert one["events"] == other["events"]
    (event,), (module, _, bad_loss) = one["events"], FAULTS[how]
    assert (event["rank"], event["module"], event["step"]) == (GUILTY, module, BAD)
    assert event["kind"] == ("nonfinite_loss" if bad_loss else "nonfinite_grad")
    assert event["severity"] == ("info" if ordinary else "warning")
    assert one["counts"] == other["counts"] == (1, 7)
    for result in (one, other):
        # another scale rounds fp16 otherwise
        assert same(result["weights"], result["clean"], of_training(mode, 1e-3) if mode == "16-mixed" else 0.0)
    files = other["files"]
    assert files == ([] if ordinary else [f"step_000003_rank{GUILTY}.pt"])
    if files:
        saved = torch.load(guarded.run_dir / "nonfinite" / files[-1], weights_only=True)
        assert (saved["rank"], saved["batch_idx"]) == (GUILTY, BAD)


@pytest.mark.parametrize("host", ["ddp", "fsdp2"])
def test_the_budget_stops_every_rank_with_the_same_error(ranks: Ranks, folder: Path, host: str) -> None:
    one, other = ranks.run(Guarded(host, "32-true", "loss", folder, (3, 4, 5), {"max_consecutive": 2}))
    assert one["error"] == other["error"] == (GUILTY, 5, "net.4")


@pytest.mark.parametrize("host", ["ddp", "fsdp2"])
def test_in_a_window_of_four_the_bad_batch_is_named(ranks: Ranks, folder: Path, host: str) -> None:
    windows = {"accumulate_grad_batches": 4}
    one, other = ranks.run(Guarded(host, "32-true", "batch", folder, (5,), options=windows))
    assert one["counts"] == other["counts"] == (1, 1)
    (event,) = one["events"]
    assert (event["rank"], event["module"], event["evidence"]["batch_idx"]) == (GUILTY, "net.0", 5)


@pytest.mark.parametrize(
    ("host", "planned"), [*((host, False) for host in ("ddp", "fsdp2", "fsdp1")), *((host, True) for host in HOSTS)]
)
def test_a_rewind_brings_every_rank_back(ranks: Ranks, tmp_path: Path, host: str, planned: bool) -> None:
    for result in ranks.run(Rewound(host, tmp_path, planned)):
        kept = result["kept"]
        assert result["events"] == ["rewind"]
        assert result["batches"] == 8
        assert same_weights(kept[6], kept[4])
        assert not same_weights(kept[5], kept[4])
        assert not same_weights(kept[8], kept[6])
        assert result["files"] == ["step_000005_rank1.pt"]


def test_stock_deepspeed_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks.run(UnderDeepSpeed(tmp_path)):
        assert "with strategy='mp_deepspeed_zero1', 2 or 3" in said


def test_a_folder_that_cannot_be_opened_ends_every_rank_with_its_cause(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for said in ranks.run(NoFolder(tmp_path / "file" / "run")):
        assert "the run's folder cannot be opened" in said.lower()
        assert str(tmp_path / "file") in said


REPLAYED = ("ddp", "fsdp2", "fsdp1", "deepspeed_zero1", "deepspeed_zero3")
REPLAYS: dict[str, Replayed] = {
    **{f"{name} gradient": Replayed(name, "16-mixed", "gradient") for name in REPLAYED},
    "ddp batch": Replayed("ddp", "16-mixed", "batch"),
    "zero3 infinite loss": Replayed("deepspeed_zero3", "16-mixed", "infinite loss"),
    "fsdp2 bf16-mixed": Replayed("fsdp2", "bf16-mixed", "gradient"),
}


@pytest.mark.parametrize("key", REPLAYS)
def test_the_guilty_rank_is_named_everywhere_and_only_for_the_bad_batch(ranks: Ranks, key: str) -> None:
    case = REPLAYS[key]
    one, other = ranks.run(case)
    assert one["diagnoses"] == other["diagnoses"]
    assert one["batches"][BAD] == other["batches"][BAD] == BAD
    module, _, bad_loss = FAULTS[case.how]
    bad: tuple[Any, ...] = (GUILTY, module, bad_loss)
    if case.strategy.startswith("deepspeed") and not bad_loss:  # backward is the engine's alone
        bad = (None, None, False)
    assert one["diagnoses"][BAD] == bad
    healthy = [diagnosis for batch, diagnosis in enumerate(one["diagnoses"]) if batch != BAD]
    assert {diagnosis[1:] for diagnosis in healthy} == {(None, False)}
    for result in (one, other):  # and it is the same run as without a replay
        assert same_weights(result["asked"], result["plain"])
