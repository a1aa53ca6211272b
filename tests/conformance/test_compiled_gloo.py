"""Compiled runs are the eager runs: a part of the table that ``make conformance`` runs whole."""

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from conformance import compiled, matrix
from conformance.judge import DIFFERS, REFUSED, SAME
from conformance.rows import COMPILED_ROWS, TABLES, choose
from conformance.strategies import world
from support.cells import WHOLE
from support.ranks import Ranks

ROWS, STRATEGIES = TABLES["compiled"]


def _sample(backend: str) -> list[tuple[str, str]]:
    rows = [row for row in ROWS if COMPILED_ROWS[row].backend == backend]
    return choose([(strategy, row) for strategy in STRATEGIES for row in rows], "compiled")


def _cells() -> Iterator[Any]:
    """A graph of inductor's takes seconds, and FP8 is emulated in many operators: CI runs them in a sample of all."""
    quick = ("single", "block.compile() inductor: bf16-mixed+all")
    for cell in (quick, *_sample("aot_eager"), *_sample("inductor")):
        marks = list(WHOLE) if "inductor" in cell[1] or "fp8" in cell[1] or world(cell[0]) > 1 else []
        if "fp8" in cell[1]:
            marks.append(pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao"))
        yield pytest.param(*cell, marks=marks)


#: inductor compiles FP8 that is emulated for a minute
SECONDS = 280.0


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Ranks]]:
    with Ranks(1, SECONDS) as one, Ranks(2, SECONDS) as two:
        yield {1: one, 2: two}


@pytest.mark.gloo
@pytest.mark.parametrize(("strategy", "name"), [*_cells()])
def test_a_compiled_run_is_the_eager_run(strategy: str, name: str, pools: dict[int, Ranks]) -> None:
    row = COMPILED_ROWS[name]
    cells = pools[world(strategy)].call(matrix.on_a_rank, strategy, name, Path(), ())
    verdict = compiled.judge(strategy, row, cells)
    assert verdict.word == (REFUSED if compiled.is_refused(strategy, row) else SAME), verdict.reasons


FORWARD_ALONE = "block.compile() aot_eager: bf16-mixed+all"


def _without_the_setting_of_the_backward_pass() -> Any:
    """Run a compiled cell under a plan that leaves torch's setting of autocast in backward passes alone."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # torch's tracing asks
        patch.setattr("lightning_mp.plan.run.backward_traced_outside_autocast", nullcontext)
        return compiled.run_cell("single", COMPILED_ROWS[FORWARD_ALONE])


@pytest.mark.gloo
def test_a_pin_that_holds_in_the_forward_alone_is_told() -> None:
    """In a process of its own, without caches: graphs of other runs have the right backward pass."""
    with Ranks(1, SECONDS, {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}) as alone:
        cells = alone.call(_without_the_setting_of_the_backward_pass)
    row: Any = COMPILED_ROWS[FORWARD_ALONE]
    verdict = compiled.judge("single", row, cells)
    assert verdict.word == DIFFERS
    assert "gradients: blocks.0" in " ".join(verdict.reasons)
