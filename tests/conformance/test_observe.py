"""The observer sees what runs: a fit of one policy, judged as if another had been declared, differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance import plain
from conformance.cells import Cell, run_cell
from conformance.judge import DIFFERS, SAME, judge
from conformance.observe import Run
from conformance.rows import PLAN

CONFUSED = {
    # what ran, what was declared, what gives it away
    "no autocast": ("32-true", "bf16-mixed", "computed in fp32, not bf16"),
    "autocast unasked": ("bf16-mixed", "32-true", "computed in bf16, not fp32"),
    "true for mixed": ("bf16-true", "bf16-mixed", "is stored in bf16, not fp32"),
    "no pins": ("bf16-true", "bf16-true+pins", "input_layernorm.weight is stored in bf16, not fp32"),
    "pins unasked": ("bf16-true+pins", "bf16-true", "input_layernorm computed in fp32, not bf16"),
    "no checkpointing": ("bf16-mixed", "bf16-mixed+ckpt", "ran 1 times a step, not 2"),
    "checkpointing unasked": ("32-true+ckpt", "32-true", "ran 2 times a step, not 1"),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cell]:
    """Every policy that ran, on one device."""
    names = {run for run, _, _ in CONFUSED.values()}
    return {name: run_cell("single", name, str(tmp_path_factory.mktemp(name))) for name in names}


@pytest.fixture(scope="module")
def references(ran: dict[str, Cell]) -> dict[str, Run]:
    """The plain loops of the same."""
    return {name: plain.reference(PLAN[name])[1] for name in ran}


@pytest.mark.parametrize("case", CONFUSED)
def test_one_policy_does_not_pass_for_another(case: str, ran: dict[str, Cell], references: dict[str, Run]) -> None:
    name, declared, named = CONFUSED[case]
    cell = ran[name]
    assert judge("single", PLAN[name], [cell], references[name]).word == SAME
    verdict = judge("single", PLAN[declared], [cell], references[name])
    assert verdict.word == DIFFERS
    assert any(named in reason for reason in verdict.reasons), verdict.reasons


def test_what_is_refused_is_told_from_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_mp import PlanError

    def raises(error: Exception) -> Cell:
        def trainer_arguments(*args: object) -> None:
            raise error

        monkeypatch.setattr("conformance.cells.trainer_arguments", trainer_arguments)
        return run_cell("single", "32-true", str(tmp_path))

    assert raises(PlanError([])).word == "refused"
    assert raises(AttributeError("a bug")).word == "FAILED"
    assert raises(ValueError("a bug of torch's")).word == "FAILED"
