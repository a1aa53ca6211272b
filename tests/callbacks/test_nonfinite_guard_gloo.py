"""The guard under Lightning's own distributed strategies: one rank's fault is everybody's skip, and is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support import guarded
from support.gloo import run_ranks
from support.models import same_weights
from support.nonfinite import BAD, FAULTS

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
BUDGETS, WINDOWS = ("ddp", "zero2"), ("ddp", "fsdp2", "zero2")


def _scenarios(folder: Path) -> list[tuple[str, str, tuple[Any, ...], dict[str, Any]]]:
    def place(*words: str) -> str:
        return str(folder / "_".join(words))

    cases: list[Any] = [(f"{h} {m} {how}", "guarded", (h, m, how, place(h, m, how)), {}) for h, m, how in CASES]
    for host in BUDGETS:
        arguments: tuple[Any, ...] = (host, "32-true", "loss", place("budget", host), (3, 4, 5))
        cases.append((f"budget {host}", "guarded", arguments, {"guard": {"max_consecutive": 2}}))
    for host in WINDOWS:
        arguments = (host, "32-true", "batch", place("window", host), (5,))
        cases.append((f"window {host}", "guarded", arguments, {"accumulate_grad_batches": 4}))
    cases += [(f"stage 0 {m}", "at_stage_0", (m, place("stage 0", m)), {}) for m in ("32-true", "bf16-mixed")]
    return [*cases, *((f"rewound {host}", "rewound", (host, place("rewound", host)), {}) for host in guarded.HOSTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guard")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What both ranks brought back, from one start of two processes."""
    return run_ranks(guarded.run, _scenarios(folder), timeout=400)


def _both(ranks: list[dict[str, Any]], key: str) -> tuple[Any, Any]:
    one, other = (rank[key] for rank in ranks)
    assert not isinstance(one, str), one
    assert not isinstance(other, str), other
    return one, other


def _ordinary(mode: str, how: str) -> bool:
    return mode == "16-mixed" and how == "gradient"


@pytest.mark.parametrize(("host", "mode", "how"), CASES)
def test_both_ranks_skip_and_name_the_guilty_one(ranks: Any, host: str, mode: str, how: str) -> None:
    one, other = _both(ranks, f"{host} {mode} {how}")
    assert one["events"] == other["events"]
    (event,) = one["events"]
    module, _, bad_loss = FAULTS[how]
    seen = bad_loss or host != "zero3"  # ZeRO-3's backward is DeepSpeed's alone
    assert (event["rank"], event["module"]) == ((guarded.GUILTY, module) if seen else (None, None))
    assert event["step"] == BAD
    assert event["kind"] == ("nonfinite_loss" if bad_loss else "nonfinite_grad")
    assert event["severity"] == ("info" if _ordinary(mode, how) else "warning")
    assert one["counts"] == other["counts"] == (1, 7)


@pytest.mark.parametrize(("host", "mode", "how"), CASES)
def test_weights_are_those_of_a_run_without_the_batch(ranks: Any, host: str, mode: str, how: str) -> None:
    one, other = _both(ranks, f"{host} {mode} {how}")
    for result in (one, other):
        if mode == "16-mixed":  # another scale rounds fp16 otherwise
            torch.testing.assert_close(result["weights"], result["clean"], rtol=1e-3, atol=1e-4)
        elif host != "fsdp1":
            assert same_weights(result["weights"], result["clean"])
        else:  # a rank's part of FSDP1's flat parameters
            torch.testing.assert_close(result["weights"], result["clean"], rtol=0, atol=0)


@pytest.mark.parametrize(("host", "mode", "how"), CASES)
def test_the_guilty_rank_saves_its_batch(ranks: Any, folder: Path, host: str, mode: str, how: str) -> None:
    files = _both(ranks, f"{host} {mode} {how}")[1]["files"]
    if _ordinary(mode, how):
        assert files == []
        return
    known = FAULTS[how][2] or host != "zero3"
    assert files == [f"step_000003_rank{rank}.pt" for rank in (0, 1) if rank == guarded.GUILTY or not known]
    saved = torch.load(folder / f"{host}_{mode}_{how}" / "nonfinite" / files[-1], weights_only=True)
    assert (saved["rank"], saved["batch_idx"]) == (guarded.GUILTY, BAD)


@pytest.mark.parametrize("host", BUDGETS)
def test_the_budget_stops_every_rank_with_the_same_error(ranks: Any, host: str) -> None:
    one, other = _both(ranks, f"budget {host}")
    assert one["error"] == other["error"] == (guarded.GUILTY, 5, "net.4")


@pytest.mark.parametrize("host", WINDOWS)
def test_in_a_window_of_four_the_bad_batch_is_named(ranks: Any, host: str) -> None:
    one, other = _both(ranks, f"window {host}")
    assert one["counts"] == other["counts"] == (1, 1)
    (event,) = one["events"]
    assert (event["rank"], event["module"], event["evidence"]["batch_idx"]) == (guarded.GUILTY, "net.0", 5)


@pytest.mark.parametrize("host", guarded.HOSTS)
def test_a_rewind_brings_every_rank_back(ranks: Any, host: str) -> None:
    for result in _both(ranks, f"rewound {host}"):
        kept = result["kept"]
        assert result["events"] == ["rewind"]
        assert result["batches"] == 8
        assert same_weights(kept[6], kept[4])
        assert not same_weights(kept[5], kept[4])
        assert not same_weights(kept[8], kept[6])


def test_deepspeed_without_zero_is_guarded_in_fp32_and_refused_in_half_precision(ranks: Any) -> None:
    """There gradients are in no place where anybody could look at them before DeepSpeed steps."""
    for said, events in _both(ranks, "stage 0 32-true"):
        assert (said, events) == ("not refused", [(BAD, guarded.GUILTY, "net.2")])
    for said, _ in _both(ranks, "stage 0 bf16-mixed"):
        assert "whose gradients only DeepSpeed sees" in said
