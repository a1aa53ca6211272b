"""The plan under DDP, in two real processes: ranks agree on every step, and one rank's overflow is everybody's skip."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from support import ddp
from support.gloo import run_ranks
from support.models import Regression, same_weights
from support.oracles import CALM_SCALE, MODES, SCALED
from support.running import fit
from support.saving import ResumableBatches, SaveAt
from support.traces import Trace

pytestmark = pytest.mark.gloo

BF16_LEAST, FP16_LEAST = 2.0**-133, 2.0**-24  # half of either is zero in its own dtype
REDUCED = {
    # mode, the ranks' gradients, reduce_dtype, stock Lightning's plugin
    "bf16-true": ("bf16-true", (BF16_LEAST, BF16_LEAST), None, False),
    "bf16-true, stock": ("bf16-true", (BF16_LEAST, BF16_LEAST), None, True),
    "bf16-true in bf16": ("bf16-true", (BF16_LEAST, BF16_LEAST), "bf16", False),
    "16-true": ("16-true", (FP16_LEAST, FP16_LEAST), None, False),
    "16-true in fp16": ("16-true", (FP16_LEAST, FP16_LEAST), "fp16", False),
    "32-true": ("32-true", (1.0, 2.0**-9), None, False),
    "32-true in bf16": ("32-true", (1.0, 2.0**-9), "bf16", False),
    "bf16-mixed": ("bf16-mixed", (1.0, 2.0**-9), None, False),
    "bf16-mixed in bf16": ("bf16-mixed", (1.0, 2.0**-9), "bf16", False),
}
HOW = ("gradient", "loss", "batch")
STOCK_MODES = ("32-true", "bf16-mixed", "16-mixed")
SKIPS = ((2,), (0, 5))


def _scenarios(folder: Path) -> list[tuple[str, str, tuple[Any, ...]]]:
    return [
        *((f"overflow {m} {o} {b}", "overflow", (m, o, b)) for m in MODES for o in ddp.OPTIMIZERS for b in SKIPS),
        *((f"scale {m}", "scale", (m,)) for m in SCALED),
        *((f"equals {m} {a}", "equals_stock", (m, a)) for m in STOCK_MODES for a in (1, 2)),
        *((f"accumulated {batch}", "accumulated", (batch,)) for batch in (0, 3, 6)),
        *((f"stopped {m} {how}", "stopped", (m, how)) for m in MODES for how in HOW),
        *((f"pinned {m}", "pinned", (m,)) for m in MODES),
        *((f"reduced {key}", "reduced", arguments) for key, arguments in REDUCED.items()),
        *((f"manual {which}", "manual", ({3: which},)) for which in ("net", "other", "net other")),
        ("resumed", "resumed", (str(folder / "single" / "4.ckpt"),)),
        ("saved", "saved", (str(folder / "ddp"),)),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ddp")


@pytest.fixture(scope="module")
def single(folder: Path) -> Trace:
    """A run on one device, whose fourth step's checkpoint DDP goes on from."""
    trace = Trace()
    callbacks, plan = [trace, SaveAt(folder / "single", 4)], ddp.resume_plan()
    module = Regression(overflow_at=(1, 2))
    fit(module, plugins=[plan], callbacks=callbacks, data=ResumableBatches(), max_epochs=2)
    return trace


@pytest.fixture(scope="module")
def ranks(folder: Path, single: Trace) -> list[dict[str, Any]]:
    """What both ranks brought back, from one start of two processes."""
    return [pickle.loads(result) for result in run_ranks(ddp.run, _scenarios(folder), timeout=150)]


def _both(ranks: list[dict[str, Any]], key: str) -> list[Any]:
    results = [rank[key] for rank in ranks]
    for rank, result in enumerate(results):
        assert not isinstance(result, str), f"rank {rank}:\n{result}"
    return results


@pytest.mark.parametrize("bad", SKIPS, ids=str)
@pytest.mark.parametrize("optimizer", ddp.OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_one_rank_overflowing_alone_makes_both_skip(ranks: Any, mode: str, optimizer: str, bad: Any) -> None:
    """And the weights stay equal on both, and equal to those of a run without that step."""
    one, other = _both(ranks, f"overflow {mode} {optimizer} {bad}")
    assert one["skipped"] == other["skipped"] == [step in bad for step in range(8)]
    assert same_weights(one["weights"], other["weights"])
    assert same_weights(one["weights"], one["clean"])
    assert not same_weights(one["weights"], one["start"])


@pytest.mark.parametrize("mode", SCALED)
def test_the_scale_is_the_same_on_both_ranks(ranks: Any, mode: str) -> None:
    one, other = _both(ranks, f"scale {mode}")
    assert one == other
    assert one["scales"] == [256.0, 128.0, 128.0, 128.0, 64.0, 64.0, 64.0, 64.0]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mode", STOCK_MODES)
def test_without_a_skip_it_is_stock_ddp_bit_for_bit(ranks: Any, mode: str, accumulate: int) -> None:
    for result in _both(ranks, f"equals {mode} {accumulate}"):
        assert result["losses"][0] == result["losses"][1]
        assert same_weights(result["stock"], result["ours"])


@pytest.mark.parametrize("batch", [0, 3, 6])
def test_an_overflow_in_an_unshared_micro_batch_reaches_everybody(ranks: Any, batch: int) -> None:
    one, other = _both(ranks, f"accumulated {batch}")
    assert one["counts"] == other["counts"] == (1, 1)
    assert same_weights(one["weights"], other["weights"])
    start, first, second = one["at"]
    assert same_weights(start, first) == (batch < 4)
    assert same_weights(first, second) == (batch >= 4)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mode", MODES)
def test_the_error_names_the_guilty_rank_on_every_rank(ranks: Any, mode: str, how: str) -> None:
    """Gradients are summed, so all ranks see infinities; the one named is the one whose own were bad."""
    one, other = _both(ranks, f"stopped {mode} {how}")
    assert one == other
    assert one["rank"] == ddp.BAD_RANK
    assert one["step"] == 5  # three skips from step 2 on are allowed
    assert one["module"] == {"gradient": "net.3", "loss": "net.3", "batch": "net.0"}[how]
    assert f"rank {ddp.BAD_RANK}, step 5" in one["message"]


@pytest.mark.parametrize("mode", MODES)
def test_pins_hold_under_ddp(ranks: Any, mode: str) -> None:
    stored = {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(mode, torch.float32)
    one, other = (result["weights"] for result in _both(ranks, f"pinned {mode}"))
    assert {name: weight.dtype for name, weight in one.items()} == {
        name: torch.float32 if name.startswith("net.1.") else stored for name in one
    }
    assert same_weights(one, other)


@pytest.mark.parametrize(
    ("key", "average"),
    [
        # Averaged in fp32, as declared: the mean of two equal numbers is that number.
        ("bf16-true", BF16_LEAST),
        ("16-true", FP16_LEAST),
        # Averaged in its own dtype it is lost, which shows that the numbers tell the two apart.
        ("bf16-true, stock", 0.0),
        ("bf16-true in bf16", 0.0),
        ("16-true in fp16", 0.0),
        ("32-true", 0.5 + 2.0**-10),
        ("bf16-mixed", 0.5 + 2.0**-10),
        ("32-true in bf16", 0.5),
        ("bf16-mixed in bf16", 0.5),
    ],
)
def test_gradients_are_averaged_in_reduce_dtype(ranks: Any, key: str, average: float) -> None:
    assert _both(ranks, f"reduced {key}") == [[average] * 4] * 2


@pytest.mark.parametrize(("which", "skips"), [("net", 1), ("other", 1), ("net other", 2)])
def test_manual_optimizers_skip_together_across_ranks(ranks: Any, which: str, skips: int) -> None:
    one, other = _both(ranks, f"manual {which}")
    assert one["scales"] == other["scales"] == [CALM_SCALE] * 3 + [CALM_SCALE / 2] * 5
    assert one["counts"] == other["counts"] == (16 - skips, skips)
    assert same_weights(one["weights"], other["weights"])
    before, after = one["each"][2], one["each"][3]
    stayed = {name.split(".")[0] for name in before if torch.equal(before[name], after[name])}
    assert stayed == set(which.split())


def test_ddp_goes_on_from_one_devices_checkpoint(ranks: Any, single: Trace) -> None:
    """Steps 1 and 2 were skipped there: the hysteresis is spent, the scale was halved once."""
    for result in _both(ranks, "resumed"):
        assert result["counts"] == (14, 2)
        assert result["scales"] == single.scales[4:]


def test_one_device_goes_on_from_ddps_checkpoint(ranks: Any, folder: Path) -> None:
    before = _both(ranks, "saved")[0]["scales"]
    plan, trace = ddp.resume_plan(), Trace()
    path = folder / "ddp" / "4.ckpt"
    fit(Regression(), plugins=[plan], callbacks=[trace], ckpt_path=path, data=ResumableBatches(), max_epochs=1)
    assert (plan.applied_steps, plan.skipped_steps) == (6, 2)
    assert trace.scales == before[4:]


def test_a_failing_rank_ends_the_run_quickly() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1 failed"):
        run_ranks(ddp.fails_on_one_rank, timeout=60)
    assert time.monotonic() - start < 45
