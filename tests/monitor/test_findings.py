from __future__ import annotations

import re

from lightning_mp.monitor.findings import CODES, Finding


def test_every_code_is_stable_in_form_and_used_once() -> None:
    assert len(set(CODES.values())) == len(CODES)
    assert all(re.fullmatch(r"LMP\d{3}", code) for code in CODES.values())


def test_a_finding_knows_its_code_and_reads_as_one_line() -> None:
    finding = Finding(name="eval_mode", severity="warning", what="it is off", why="w", fix="turn it on")
    assert finding.code == CODES["eval_mode"]
    assert finding.to_dict()["code"] == finding.code
    assert str(finding) == f"{finding.code} warning: it is off. Why: w. Fix: turn it on"
    placed = Finding(name="norm_in_half", severity="warning", what="x", why="w", fix="f", where="model.norm")
    assert "[model.norm]" in str(placed)
