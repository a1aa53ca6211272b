"""The smaller matrix: a row of each table under a few strategies, in real processes; ``make conformance`` runs all."""

from pathlib import Path

import pytest

from conformance import matrix, plain
from conformance.cells import Cell, run_cell
from conformance.judge import DIFFERS, REFUSED, SAME, judge
from conformance.observe import Run
from conformance.rows import PLAN
from support.cells import WHOLE

#: the rows whose cells are run, of one table each, and under which strategies; CI runs these on the oldest releases,
#: and on the newest a sample of all
ROWS, SOME = ("16-mixed+pins", "whisper: 16-mixed+pins", "lion 16-mixed"), ("single", "ddp", "fsdp2", "deepspeed_zero2")


@pytest.fixture(scope="module")
def references() -> matrix.References:
    return {}


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ["single", *(pytest.param(name, marks=WHOLE) for name in SOME[1:])])
def test_every_cell_ends_as_expected(strategy: str, references: matrix.References) -> None:
    verdicts = matrix.column(strategy, ROWS, references)
    said = {name: "\n".join(verdict.reasons) for name, verdict in verdicts.items()}
    assert {name: verdict.word for name, verdict in verdicts.items()} == dict.fromkeys(ROWS, SAME), said


#: cells that were something else once, by what is special about them
OTHERS = [
    ("single", "llama + lora: bf16-mixed+ckpt", SAME), ("fsdp1", "16-mixed", SAME),
    ("fsdp1_offload", "adamw 16-mixed", SAME), ("deepspeed_zero1_offload", "adamw 16-mixed", SAME),
    ("fsdp2", "muon 16-mixed", SAME), ("fsdp2", "sam bf16-mixed", REFUSED),
    ("deepspeed_zero2", "mamba: bf16-mixed", SAME), ("ddp", "fp8 weights + lora: bf16-mixed", SAME),
    ("fsdp2", "adamw_8bit 16-mixed", SAME), ("deepspeed_zero2", "adamw_8bit 16-mixed", REFUSED),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.gloo
@pytest.mark.parametrize(("strategy", "row", "word"), OTHERS)
def test_a_cell(strategy: str, row: str, word: str, references: matrix.References) -> None:
    if row.startswith("adamw_8bit"):
        pytest.importorskip("torchao")
    verdict = matrix.column(strategy, [row], references)[row]
    assert verdict.word == word, verdict.reasons


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
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Cell, Run]]:
    names = {run for run, _, _ in CONFUSED.values()}
    folder = tmp_path_factory.mktemp
    return {name: (run_cell("single", name, str(folder(name))), plain.reference(PLAN[name])[1]) for name in names}


@pytest.mark.parametrize("case", CONFUSED)
def test_one_policy_does_not_pass_for_another(case: str, ran: dict[str, tuple[Cell, Run]]) -> None:
    name, declared, named = CONFUSED[case]
    cell, reference = ran[name]
    assert judge("single", PLAN[name], [cell], reference).word == SAME
    verdict = judge("single", PLAN[declared], [cell], reference)
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
