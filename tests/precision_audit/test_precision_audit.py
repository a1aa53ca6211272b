"""PrecisionAudit: every fault it is for is found and named, it only reads, and it leaves nothing behind."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_mp import PlanError
from lightning_mp.precision_audit.callback import PrecisionAudit
from support import audit_faults as faults
from support.models import Regression
from support.oracles import plan_for
from support.running import fit

NORM_PIN = {"*Norm": "fp32"}


def _bf16(**options: Any) -> dict[str, Any]:
    return {"plugins": [plan_for("bf16-mixed", **options)]}


def _audited(module: LightningModule, folder: Path, **arguments: Any) -> tuple[PrecisionAudit, list[str]]:
    """A run of two steps with an audit, and what it warned of."""
    callback = PrecisionAudit(run_dir=folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        others = arguments.pop("callbacks", [])
        fit(module, callbacks=[*others, callback], max_steps=2, **arguments)
    return callback, [str(one.message) for one in caught if "PrecisionAudit" in str(one.message)]


# ---------------------------------------------------------------------- what it is for

#: what is wrong, how it runs, the module and the column that differ, what is said of it
FAULTS: dict[str, tuple[Callable[[], LightningModule], dict[str, Any], str, str, str]] = {
    "a module cast behind the plan": (faults.CastBehind, _bf16(), "net.3", "param", "cast by hand"),
    "a bf16 checkpoint under stock bf16-mixed": (
        faults.HalfCheckpoint,
        {"precision": "bf16-mixed"},
        "net.0",
        "param",
        "no fp32 master weights",
    ),
    "a pin lost by loading": (faults.LostPin, _bf16(pins=NORM_PIN), "net.1", "param", "after the pin"),
    "an op outside autocast": (faults.OutsideAutocast, _bf16(), "net.3", "compute", "autocast is off"),
    "autocast off inside a module": (faults.Inside, _bf16(), "net.2", "compute", "autocast is off"),
    "a product in the step itself": (faults.RootProduct, _bf16(), "", "compute", "autocast is off"),
    "a module that casts itself": (faults.Custom, _bf16(), "net.0", "compute", "casts its inputs"),
    "the same although pinned": (faults.Custom, _bf16(pins={"net.0": "fp32"}), "net.0", "compute", "not in force"),
    "a norm in half": (faults.NormInHalf, _bf16(), "net.1", "compute", "cast to half precision"),
    "a norm written out": (faults.OwnNormInHalf, _bf16(), "net.1", "compute", "cast to half precision"),
    "optimizer state in half": (faults.HalfState, _bf16(), "net.0", "optimizer_state", "optimizer keeps its state"),
    "optimizer state in fp32": (
        faults.FullState,
        {"plugins": [plan_for("bf16-true")]},
        "net.0",
        "optimizer_state",
        "optimizer keeps its state",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_every_fault_is_found_and_named_and_nothing_else(case: str, tmp_path: Path) -> None:
    make, how, module, column, reason = FAULTS[case]
    callback, told = _audited(make(), tmp_path, **how)
    row = next(row for row in callback.rows if row.module == module)
    assert [difference.what for difference in row.differences] == [column]
    assert not row.ok
    assert reason in row.differences[0].reason
    assert len(told) == 1
    assert (module or "(the root module)") in told[0]
    assert reason in told[0]
    everywhere = column == "optimizer_state" or make is faults.HalfCheckpoint
    assert {row.module for row in callback.rows if not row.ok} == (
        {"net.0", "net.1", "net.3"} if everywhere else {module}
    )


def test_a_difference_can_stop_the_run(tmp_path: Path) -> None:
    module = faults.CastBehind()
    with pytest.raises(PlanError) as caught:
        fit(module, callbacks=[PrecisionAudit(on_mismatch="raise", run_dir=tmp_path)], **_bf16())
    assert "net.3 with parameters stored in bf16. Allowed: fp32, as MixedPrecisionPlan('bf16-mixed')" in str(
        caught.value
    )
    assert len(module.losses) == 1
    assert json.loads((tmp_path / "audit.json").read_text())["ok"] is False  # it was written all the same


def test_a_step_that_fails_tells_what_was_seen_until_then(tmp_path: Path) -> None:
    callback = PrecisionAudit(run_dir=tmp_path)
    with (
        pytest.warns(UserWarning, match="net.1 with parameters stored in bf16"),
        pytest.raises(RuntimeError, match="dtype"),
    ):
        fit(faults.LostPin(nn.LayerNorm(32)), callbacks=[callback], **_bf16(pins=NORM_PIN))
    assert json.loads((tmp_path / "audit.json").read_text())["ok"] is False


# ---------------------------------------------------------------------- what is there to read


def test_the_table_is_logged_written_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        callback, told = _audited(Regression(), tmp_path, **_bf16(pins={"net.3": "fp32"}, tf32="high"))
    assert told == []
    assert [(row.module, row.declared, row.compute, row.ok) for row in callback.rows] == [
        ("net.0", "bf16", "bf16", True),
        ("net.1", "bf16", "bf16, fp32", True),  # on the CPU autocast hands it the half input: weights stay fp32
        ("net.3", "fp32", "fp32", True),
    ]
    row = callback.rows[0]
    assert (row.param, row.input, row.output, row.grad, row.reduce) == ("fp32", "fp32", "bf16", "fp32", None)
    assert row.optimizer_state == "fp32"
    assert callback.report is not None
    assert json.loads((tmp_path / "audit.json").read_text()) == callback.report.to_dict()
    assert (tmp_path / "audit.md").read_text() == callback.report.to_markdown()
    logged = [record.getMessage() for record in caplog.records if record.getMessage().startswith("PrecisionAudit")]
    assert len(logged) == 1
    assert "tf32='high' changes nothing on CPU" in logged[0]


# ---------------------------------------------------------------------- which steps


class Hooked(Regression):
    """Notes in which steps hooks stand."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.hooked: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.hooked.append(bool(self.net[0]._forward_hooks or self.net[0]._forward_pre_hooks))
        mode = torch.utils._python_dispatch._get_current_dispatch_mode()
        assert self.hooked[-1] == (mode is not None)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("options", "accumulate", "steps"),
    [
        ({}, 1, [0]),
        ({"steps": 3}, 1, [0, 1, 2]),
        ({}, 4, [0, 1, 2, 3]),  # one optimizer step is four batches
        ({"steps": 100}, 1, list(range(8))),
    ],
)
def test_hooks_stand_in_the_steps_looked_at_alone(
    options: dict[str, Any], accumulate: int, steps: list[int], tmp_path: Path
) -> None:
    module, callback = Hooked(), PrecisionAudit(run_dir=tmp_path, **options)
    fit(module, callbacks=[callback], accumulate_grad_batches=accumulate, **_bf16())
    assert [step for step, hooked in enumerate(module.hooked) if hooked] == steps
    assert callback.report is not None
    assert callback.rows[0].optimizer_state == "fp32"


# ---------------------------------------------------------------------- however it is run
