"""The page of the sources: each sentence names a test that exists; what torch's formats and data sheets say of them."""

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_mp import FP8
from lightning_mp.modules import fp8
from lightning_mp.planner import ModelShape
from lightning_mp.policy.hardware import GPUS, peak
from support.docs import ROOT, tables

PAGE = "docs/explanation/sources.md"
TESTS = ROOT / "tests"
NAMED = re.compile(r"^`(?P<file>[\w/]+\.py)::(?P<test>test_\w+)`$")
#: sentences of each of the five documents, in their order
SENTENCES = (24, 46, 26, 17, 10)


@cache
def _tests_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_sentence_names_a_test_that_exists() -> None:
    documents = [table[1:] for table in tables(PAGE)]
    assert tuple(len(rows) for rows in documents) == SENTENCES
    for sentence, here, shown_by in (row for rows in documents for row in rows):
        if shown_by == "-":
            assert here.startswith("History:"), sentence
            continue
        named = NAMED.match(shown_by)
        assert named, shown_by
        file = TESTS / named["file"]
        assert file.is_file(), shown_by
        assert named["test"] in _tests_in(file), shown_by


def test_the_page_is_on_the_site() -> None:
    assert "explanation/sources.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_the_formats_are_as_torch_says() -> None:
    half, brain, single = (torch.finfo(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32))
    assert half.max == 65504
    assert brain.max == pytest.approx(single.max, rel=0.01)
    # 24, 11 and 8 significant bits, at every magnitude
    assert (single.eps, half.eps, brain.eps) == (2.0**-23, 2.0**-10, 2.0**-7)
    assert half.tiny == pytest.approx(6.1e-5, rel=0.01)
    assert torch.tensor(1e-7, dtype=torch.float16) > 0
    assert torch.tensor(2e-8, dtype=torch.float16) == 0
    assert not hasattr(torch, "float8_e4m3")
    assert hasattr(torch, "float8_e4m3fn")


def test_an_overflow_needs_a_lower_scale_and_an_underflow_a_higher_one() -> None:
    large, small = torch.tensor(10.0), torch.tensor(1e-8)
    assert (large * 2.0**16).half().isinf()
    assert (large * 2.0**10).half().isfinite()
    assert small.half() == 0
    assert (small * 2.0**16).half() > 0


def test_eight_times_is_an_a100s_data_sheet_and_not_a_run() -> None:
    card = GPUS["a100-80"].device
    tf32, fp32 = (peak(card, dtype) for dtype in ("tf32", "fp32"))
    assert tf32 is not None
    assert fp32 is not None
    assert tf32 / fp32 == pytest.approx(8)
    measured = 15_402 / 12_599
    assert measured == pytest.approx(1.22, abs=0.005)


def _saved_bytes(run: Callable[[], Tensor]) -> int:
    """Bytes that the forward pass keeps for the backward pass."""
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = run()
    assert output.requires_grad
    return sum(saved.values())


def test_fp8_keeps_activations_in_bf16() -> None:
    pytest.importorskip("torchao")
    layer, rows = torch.nn.Linear(64, 64, bias=False), torch.randn(4096, 64, dtype=torch.bfloat16)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(rows)

    in_bf16 = _saved_bytes(run)
    undo = fp8.apply([layer], FP8(small="convert"), torch.bfloat16, "cpu")
    in_fp8 = _saved_bytes(run)
    undo()
    assert in_bf16 >= 2 * rows.numel()
    assert in_fp8 >= 2 * rows.numel(), "half as much would be one byte a number"


def test_chinchillas_budget_grows_with_the_root_of_compute() -> None:
    small, large = (ModelShape.of_size(size) for size in (7e9, 70e9))
    assert small.tokens == 20 * small.params
    compute = [6 * shape.params * shape.tokens for shape in (small, large)]
    root = (compute[1] / compute[0]) ** 0.5
    assert large.params / small.params == pytest.approx(root)
    assert large.tokens / small.tokens == pytest.approx(root)
