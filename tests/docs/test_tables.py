"""What the documentation's tables say is so: migrations, modes, conformance, bytes."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance import expected
from conformance.strategies import STRATEGIES
from lightning_mp import MixedPrecisionPlan
from lightning_mp.numerics.dtypes import set_tf32
from lightning_mp.policy import PRECISIONS, PrecisionPolicy
from support import docs_run
from support.docs import tables, text

CODE = re.compile(r"^`([^`]+)`$")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(docs_run.PROJECT))
    restore = set_tf32("highest")
    yield docs_run.names()
    restore()


def _rows(page: str) -> Iterator[tuple[str, str]]:
    for table in (table for table in tables(page) if table[0][0] != "key"):
        for row in table[1:]:
            found = [CODE.match(cell) for cell in row[:2]]
            if len(found) == 2 and found[0] and found[1]:
                yield found[0][1], found[1][1]


def _is_expression(code: str) -> bool:
    try:
        return isinstance(ast.parse(code, mode="eval").body, ast.Call | ast.Attribute)
    except SyntaxError:
        return False


@pytest.mark.filterwarnings("ignore")  # what stock hosts say of a CPU
@pytest.mark.parametrize("page", ["migrate", "deepspeed"])
def test_both_sides_of_a_row_are_what_their_hosts_take(page: str, project: dict[str, Any]) -> None:
    rows = [(old, new) for old, new in _rows(f"docs/how-to/{page}.md") if _is_expression(new)]
    assert len(rows) > 12
    for old, new in rows:
        if page == "deepspeed":
            assert MixedPrecisionPlan.from_deepspeed(json.loads(f"{{{old}}}")).deepspeed_notes, old
        elif 'accelerator="cuda"' not in old:
            _evaluated(old, project)
        _evaluated(new, project)


def _evaluated(code: str, names: dict[str, Any]) -> Any:
    try:
        return eval(code, dict(names))
    except Exception as error:
        raise AssertionError(f"{code}: {type(error).__name__}: {error}") from error


def test_the_table_of_modes_is_the_policys() -> None:
    (table,) = [table for table in tables("docs/reference/plan.md") if table[0][0] == "precision"]
    rows = {row[0].strip("`"): row[1:] for row in table[1:]}
    for precision in (name for name in PRECISIONS if name != "auto"):
        policy = PrecisionPolicy(precision=precision)
        stored, computed, reduced, state, scale, size = rows[precision]
        assert stored == state == policy.storage_dtype
        assert computed.split()[0].rstrip(",") == policy.compute_dtype
        assert reduced == policy.reduce_dtype
        assert (scale == "dynamic") == (policy.loss_scaling is not None)
        # weight, gradient and Adam's two moments, all as stored
        assert int(size) == 4 * {"fp32": 4, "bf16": 2, "fp16": 2}[policy.storage_dtype]


def test_the_page_of_conformance_has_every_strategy_and_no_fault() -> None:
    full, (table,) = text("docs/conformance.txt"), tables("docs/reference/conformance.md")
    assert not re.findall(r"DIFFERS|FAILED", full.partition("\n## Plan")[2])
    assert {row[0].strip("`") for row in table[1:]} == set(STRATEGIES)
    words = {word for row in table[1:] for cell in row[1:] for word in re.findall(r"[a-z]+|-", cell)}
    assert words == {"same", "refused", "no", "pins", "-"}


#: bytes a parameter on one of eight devices, as how-to/out-of-memory.md says
BYTES = {
    "fsdp2": 16 / 8, "fsdp1": 16 / 8, "deepspeed_zero3": 20 / 8,
    "deepspeed_zero1": 4 + 16 / 8, "deepspeed_zero2": 4 + 16 / 8,
}  # fmt: skip


@pytest.mark.parametrize("strategy", BYTES)
def test_the_bytes_a_device_holds_are_those_that_conformance_measures(strategy: str) -> None:
    assert sum(expected.by_formula(strategy, S=4, P=1, N=8)) == BYTES[strategy]
