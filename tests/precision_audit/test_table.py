"""The table of an audit: a line for layers that are alike, in the width there is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_mp.precision_audit.judge import Difference
from lightning_mp.precision_audit.report import AuditReport, AuditRow, ranges

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


def _report(*names: str, **changes: object) -> AuditReport:
    return AuditReport(tuple(replace(ROW, module=name, **changes) for name in names), "a plan")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["a"], ["a"]),
        ([""], ["(the root module)"]),
        (["h.0.fc", "h.1.fc", "h.2.fc"], ["h.[0-2].fc"]),
        (["h.0.fc", "h.2.fc", "h.3.fc"], ["h.0.fc", "h.[2-3].fc"]),
        (["h.0.a", "h.0.b", "h.1.a", "h.1.b"], ["h.[0-1].a", "h.[0-1].b"]),
        (["net.0", "net.1"], ["net.0", "net.1"]),
        ([f"h.{i}.e.{j}.w" for i in range(12) for j in range(3)], ["h.[0-11].e.[0-2].w"]),
        (["a.0.w", "b.1.w"], ["a.0.w", "b.1.w"]),
        (["h.0.fc", "x", "h.1.fc"], ["h.[0-1].fc", "x"]),
    ],
)
def test_repeated_layers_share_a_line(names: list[str], wanted: list[str]) -> None:
    assert ranges(names) == wanted


def test_only_layers_that_are_alike_share_a_line() -> None:
    rows = [replace(ROW, module=f"h.{i}.fc", compute="fp32" if i == 2 else "bf16", ok=i != 2) for i in range(4)]
    text = AuditReport(tuple(rows), "a plan").to_text()
    assert [line.split()[:2] for line in text.splitlines() if "h." in line] == [
        ["h.[0-1].fc", "bf16"],
        ["!", "h.2.fc"],
        ["h.3.fc", "bf16"],
    ]


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


def test_a_narrow_table_says_once_what_is_alike() -> None:
    rows = (replace(ROW, module="net"), replace(ROW, module="head", input="bf16", output="fp32"))
    assert AuditReport(rows, "a plan").to_text(95).splitlines()[1:] == [
        "  every module: declared bf16, param fp32, compute bf16, grad fp32, reduce -, state fp32",
        "  module  input  output",
        "  net     fp32   bf16",
        "  head    bf16   fp32",
    ]


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


def test_alike_differences_are_told_once_and_every_name_is_there() -> None:
    few = _report("a", "b.0.c", ok=False, differences=(WRONG,)).explanation()
    assert few.startswith("  1. Got a, b.0.c (2 modules) computed in fp32")
    many = _report(*(f"h.{i}.fc" for i in range(40)), ok=False, differences=(WRONG,)).explanation()
    assert many.startswith("  1. Got h.[0-39].fc (40 modules) computed in fp32")
    assert len(many.splitlines()) == 1
