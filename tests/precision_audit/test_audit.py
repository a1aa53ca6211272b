"""``audit``: of a bare module, of one batch through it, and of a Trainer while it runs and afterwards."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_mp import PlanError
from lightning_mp.precision_audit.audit import PrecisionAudit, audit
from lightning_mp.precision_audit.judge import Difference
from lightning_mp.precision_audit.report import AuditReport, AuditRow, grouped
from support.models import Regression
from support.oracles import MODES, plan_for, stock_for
from support.pinning import pin
from support.running import fit, trainer


def _rows(report: AuditReport) -> dict[str, Any]:
    return {row.module: row for row in report.rows}


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


def test_a_bare_module_shows_what_it_has() -> None:
    net = _net()
    net[0].half()
    net[3](torch.randn(2, 8)).sum().backward()
    found = _rows(audit(net))
    assert {name: (row.param, row.grad, row.compute, row.ok) for name, row in found.items()} == {
        "0": ("fp16", None, None, True),  # nothing declares otherwise
        "1": ("fp32", None, None, True),
        "3": ("fp32", "fp32", None, True),
    }


def test_a_pin_that_was_lost_shows_without_a_plan() -> None:
    net = pin(_net(), {"BatchNorm1d": "fp32"})
    assert audit(net.to(torch.bfloat16)).ok  # the pin holds
    net[1].weight.data = net[1].weight.data.bfloat16()
    assert [row.module for row in audit(net).rows if not row.ok] == ["1"]


class Asks(Callback):
    def __init__(self) -> None:
        self.reports: list[AuditReport] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.reports.append(audit(trainer))
        self.reports.append(audit(pl_module))


@pytest.mark.parametrize("how", ["plan", "stock"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_while_it_lasts_and_afterwards(mode: str, how: str) -> None:
    asks = Asks()
    stock = {"precision": "16-true"} if mode == "16-true" else stock_for(mode)
    precision = {"plugins": [plan_for(mode)]} if how == "plan" else stock
    module = Regression(lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4))
    runner = fit(module, callbacks=[asks], max_steps=2, **precision)
    storage = "fp32" if mode.endswith("mixed") else plan_for(mode).policy.storage_dtype
    for report in (*asks.reports, audit(runner), audit(module)):
        assert report.ok, report
        assert {(row.param, row.optimizer_state) for row in report.rows} == {(storage, storage)}
        assert report.rows[0].compute is None
        assert "nothing was run" in report.notes[-1]


def test_what_a_callback_saw_is_told_along(tmp_path: Any) -> None:
    callback = PrecisionAudit(run_dir=tmp_path)
    runner = fit(Regression(), plugins=[plan_for("bf16-mixed", pins={"net.3": "fp32"})], callbacks=[callback])
    report = audit(runner)
    assert [(row.input, row.compute) for row in report.rows] == [(row.input, row.compute) for row in callback.rows]
    assert report.where == "cpu, after 8 steps"
    runner.lightning_module.net[0].half()
    (wrong,) = (row for row in audit(runner).rows if not row.ok)
    assert (wrong.module, wrong.param, wrong.compute) == ("net.0", "fp16", "bf16")


def test_a_trainer_without_a_module_is_refused() -> None:
    with pytest.raises(PlanError, match="Trainer without a module"):
        audit(trainer())


ROW = AuditRow(
    module="net",
    declared="bf16",
    param="fp32",
    input="fp32",
    output="bf16",
    compute="bf16",
    grad="fp32",
    reduce=None,
    optimizer_state="fp32",
    ok=True,
)
STAR = (
    "* not a difference: norms, look-ups and elementwise work may run in fp32 (torch's autocast lists, or the module's "
    "own code), and fp32 products in TF32 where torch's switches allow it"
)
WRONG = Difference("compute", "bf16", "fp32", "autocast is off", "turn it on")


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["a"], ["a"]),
        ([""], ["(the root module)"]),
        (["h.0.fc", "h.1.fc", "h.2.fc"], ["h.*.fc (3)"]),
        (["h.0.a", "h.0.b", "h.1.a", "h.1.b"], ["h.*.a (2)", "h.*.b (2)"]),
        (["net.0", "net.1"], ["net.0", "net.1"]),
        ([f"h.{i}.e.{j}.w" for i in range(12) for j in range(3)], ["h.*.e.*.w (36)"]),
        (["a.0.w", "b.1.w"], ["a.0.w", "b.1.w"]),
        (["h.0.fc", "x", "h.1.fc"], ["h.*.fc (2)", "x"]),
    ],
)
def test_repeated_layers_share_a_line(names: list[str], wanted: list[str]) -> None:
    assert [name for name, _ in grouped(dict.fromkeys(names))] == wanted


def test_only_layers_that_are_alike_share_a_line() -> None:
    rows = [replace(ROW, module=f"h.{i}.fc", compute="fp32" if i == 2 else "bf16", ok=i != 2) for i in range(4)]
    text = AuditReport(tuple(rows), "a plan").to_text()
    assert [line.split()[:2] for line in text.splitlines() if "h." in line] == [["h.*.fc", "(3)"], ["!", "h.2.fc"]]


def test_the_text_of_a_small_report() -> None:
    rows = (
        replace(ROW, module="net.0"),
        replace(ROW, module="norm", compute="fp32"),
        replace(ROW, module="net.1", ok=False),
    )
    assert AuditReport(rows, "a plan", "step 0, cpu", ("a note",)).to_text(200) == "\n".join(
        [
            "1 of 3 modules not as declared by a plan (step 0, cpu)",
            "  module  declared         param  input  output  compute  grad  reduce  state",
            "  net.0   bf16             fp32   fp32   bf16    bf16     fp32  -       fp32",
            "  norm    bf16 (autocast)  fp32   fp32   bf16    fp32*    fp32  -       fp32",
            "! net.1   bf16             fp32   fp32   bf16    bf16     fp32  -       fp32",
            STAR,
            "a note",
        ]
    )


def test_the_markdown_is_a_table_with_what_differs_below_it() -> None:
    report = AuditReport(
        (ROW, replace(ROW, module="net.1", ok=False, differences=(WRONG,))), "a plan", notes=("a note",)
    )
    lines = report.to_markdown().splitlines()
    assert lines[0] == "1 of 2 modules not as declared by a plan."
    assert lines[2] == "| module | declared | param | input | output | compute | grad | reduce | state | ok |"
    assert lines[5] == "| `net.1` | bf16 | fp32 | fp32 | bf16 | bf16 | fp32 | - | fp32 | **no** |"
    assert lines[7].startswith(
        "- Got net.1 computed in fp32. Allowed: bf16, as a plan declares. Likely cause: autocast is off"
    )
    assert lines[9] == "> a note"
