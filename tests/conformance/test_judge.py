"""The judge can fail: each observation that is not as declared is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance import expected, report
from conformance.cells import BAD_STEP, SAVED_AT, SHORT, Cell
from conformance.judge import DIFFERS, FAILED, REFUSED, SAME, Verdict, judge
from conformance.matrix import Matrix
from conformance.model import CLIP, STEPS
from conformance.observe import Parts, Run
from conformance.rows import OPTIMIZERS, PLAN, Row

NORM = 2.0
SCALED = PLAN["16-mixed+pins+ckpt"]
FP32 = PLAN["32-true"]
TRUE = PLAN["bf16-true+pins"]
LION = OPTIMIZERS["lion 16-mixed"]


def _parts(norm: float, row: Row = PLAN["32-true"]) -> Parts:
    """Every rank holds every gradient whole."""
    whole = expected.whole(row)
    return {name: (numbers, norm**2 / len(whole)) for name, numbers in whole.items()}


def _run(row: Row, attempts: int, skipped: tuple[int, ...] = (), begun: int = 0) -> Run:
    here = attempts - begun
    return Run(
        losses=[5.0 - 0.1 * step for step in range(begun, attempts)],
        lrs=expected.rates(row, attempts, skipped)[begun:],
        scales=expected.growing_scales(attempts)[begun:] if row.policy.scaled else [],
        skipped=[step in skipped for step in range(begun, attempts)],
        counts=(attempts - len(skipped), len(skipped)),
        norms=[NORM] * here,
        before=[_parts(NORM, row)] * here,
        after=[_parts(CLIP, row)] * here,
        weights={name: torch.arange(numbers) / numbers for name, numbers in expected.whole(row).items()},
        moments=[{"exp_avg": torch.ones(2), "step": torch.tensor(float(attempts))}],
    )


def _main(row: Row) -> Run:
    run, policy = _run(row, STEPS), row.policy
    run.stored = expected.stored(row)
    run.computed = {name: {dtype} for name, dtype in expected.computed(row).items()}
    run.handed_on = {name: {dtype} for name, dtype in expected.handed_on(row).items()}
    run.calls = expected.calls(row)
    run.backward, run.reduced = {policy.compute}, {("allreduce", "fp32")}
    run.state = {policy.storage, policy.norm_storage}
    run.bytes = {key: int(value) for key, value in expected.bytes_per_rank("ddp", row).items()}
    run.whole = {name: tensor + tensor.new_ones(()) for name, tensor in expected.start(row).items()}
    return run


def _cells(row: Row) -> list[Cell]:
    """What two ranks of DDP see where everything is as declared."""
    cells = []
    for rank in range(2):
        overflow, clean = _run(row, SHORT, (BAD_STEP,)), _run(row, SHORT - 1)
        overflow.moments = clean.moments
        runs = {"main": _main(row), "resumed": _run(row, STEPS, begun=SAVED_AT)}
        runs |= {"overflow": overflow, "clean": clean}
        if row.policy.scaled:
            runs["dynamic"] = _run(row, SHORT, (BAD_STEP,))
            runs["dynamic"].scales = expected.halved_scales(SHORT, BAD_STEP)
        cells.append(Cell(rank, runs))
    return cells


def _verdict(row: Row, tamper: Callable[[list[Cell]], Any] = lambda cells: None) -> Verdict:
    cells = _cells(row)
    tamper(cells)
    return judge("ddp", row, cells, _main(row))


@pytest.mark.parametrize("name", [*PLAN, "lion 16-mixed"])
def test_what_is_as_declared_is_the_same(name: str) -> None:
    verdict = _verdict((PLAN | OPTIMIZERS)[name])
    assert (verdict.word, verdict.reasons) == (SAME, [])


def _runs(name: str, change: Callable[[Run], Any], rank: int | None = None) -> Callable[[list[Cell]], None]:
    def tamper(cells: list[Cell]) -> None:
        for cell in cells if rank is None else [cells[rank]]:
            change(cell.runs[name])

    return tamper


def _each(what: str, factor: float) -> Callable[[Run], None]:
    return lambda run: setattr(run, what, [value * factor for value in getattr(run, what)])


def _put(what: str, key: str, value: Any) -> Callable[[Run], None]:
    return lambda run: getattr(run, what).__setitem__(key, value)


def _set(what: str, value: Any) -> Callable[[Run], None]:
    return lambda run: setattr(run, what, value)


def _nudge(run: Run) -> None:
    run.weights["model.lm_head.weight"][0] += 1e-6


def _move_on(run: Run) -> None:
    run.lrs = expected.rates(FP32, SHORT)


def _forget_moments(cells: list[Cell]) -> None:
    for run in (run for cell in cells for run in cell.runs.values()):
        run.moments = [{}]


def _nan(run: Run) -> None:
    run.losses[3] = math.nan


def _further(name: str, by: float) -> Callable[[Run], None]:
    return lambda run: run.whole.__setitem__(name, run.whole[name] + by)


NORM_MODULE = "model.model.layers.1.input_layernorm"
TAMPERED: dict[str, tuple[Row, Callable[[list[Cell]], None], str]] = {
    "a pinned norm stored in half": (TRUE, _runs("main", _put("stored", f"{NORM_MODULE}.weight", "bf16")), "dtype: "),
    "a pinned norm computed in half": (TRUE, _runs("main", _put("computed", NORM_MODULE, {"bf16"})), NORM_MODULE),
    "a norm that hands on fp32": (TRUE, _runs("main", _put("handed_on", NORM_MODULE, {"fp32"})), "handed on in fp32"),
    "a linear in fp32": (SCALED, _runs("main", _put("computed", "model.lm_head", {"fp32"})), "model.lm_head computed"),
    "a module nobody saw": (
        FP32,
        _runs("main", lambda run: run.computed.pop("model.lm_head")),
        "nothing that was seen",
    ),
    "products of backward in fp32": (SCALED, _runs("main", _set("backward", {"fp16", "fp32"})), "fp16+fp32"),
    "reduced in half": (TRUE, _runs("main", _set("reduced", {("allreduce", "bf16")})), "reduced gradients in bf16"),
    "nothing reduced": (FP32, _runs("main", _set("reduced", set())), "reduced gradients in nothing"),
    "state in fp32": (TRUE, _runs("main", _set("state", {"fp32"})), "optimizer state in fp32"),
    "no recomputation": (SCALED, _runs("main", _put("calls", "model.lm_head", 2.0)), "checkpointing: "),
    "a loss 1 % off": (FP32, _runs("main", _each("losses", 1.01)), "loss: "),
    "a loss 3 % off in half": (SCALED, _runs("main", _each("losses", 1.03)), "loss: "),
    "a loss that is no number": (SCALED, _runs("main", _nan), "loss: nan at step 3"),
    "a norm in half": (FP32, _runs("main", _each("norms", 0.5)), "norm: clipped by 1 "),
    "a norm of scaled gradients": (SCALED, _runs("main", _each("norms", 256.0)), "norm: clipped by 512 "),
    "another norm on one rank": (FP32, _runs("main", _each("norms", 0.999), rank=1), "different norms"),
    "no norm": (FP32, _runs("main", _set("norms", [None] * STEPS)), "norm: 0 norms were seen, not 20"),
    "weights nobody saw": (FP32, _runs("clean", _set("weights", {})), "skip: rank 0, weights"),
    "optimizer state nobody saw": (FP32, _forget_moments, "optimizer state was not seen"),
    "gradients that were not clipped": (FP32, _runs("main", _set("after", [_parts(NORM)] * STEPS)), "after clipping"),
    "gradients that are not the norm's": (
        FP32,
        _runs("main", _set("before", [_parts(3.0)] * STEPS)),
        "before clipping",
    ),
    "weights that differ between ranks": (FP32, _runs("main", _nudge, rank=1), "ranks: main, model.lm_head.weight"),
    "weights that differ after a skip": (FP32, _runs("overflow", _nudge, rank=1), "ranks: overflow"),
    "a skip that left something": (FP32, _runs("overflow", _nudge), "skip: rank 0, weights differ"),
    "moments that decayed on a skip": (
        FP32,
        _runs("overflow", _set("moments", [{"exp_avg": torch.zeros(2), "step": torch.tensor(5.0)}])),
        "skip: rank 0, optimizer state",
    ),
    "a rank that did not skip": (
        FP32,
        _runs("overflow", _set("skipped", [False] * SHORT), rank=0),
        "skip: overflow, rank 0",
    ),
    "a rate that moved on a skip": (SCALED, _runs("overflow", _move_on), "schedule: overflow"),
    "a skip that was not counted": (FP32, _runs("overflow", _set("counts", (6, 0))), "counters: overflow"),
    "a step that was skipped in passing": (FP32, _runs("main", _set("counts", (19, 1))), "counters: main"),
    "a scale that did not back off": (
        SCALED,
        _runs("dynamic", _set("scales", [256.0] * SHORT)),
        "scale: dynamic, rank 0",
    ),
    "a scale that did not grow": (SCALED, _runs("main", _set("scales", [256.0] * STEPS)), "scale: main"),
    "a scale that was not saved": (
        SCALED,
        _runs("resumed", _set("scales", [256.0] * (STEPS - SAVED_AT))),
        "scale: resumed",
    ),
    "a schedule that began again": (
        FP32,
        _runs("resumed", _set("lrs", expected.rates(FP32, STEPS - SAVED_AT))),
        "schedule: resumed",
    ),
    "counts that began again": (FP32, _runs("resumed", _set("counts", (8, 0))), "counters: resumed"),
    "weights that were not saved": (FP32, _runs("resumed", _nudge), "resume: rank 0, weights differ"),
    "other losses after a resume": (FP32, _runs("resumed", _each("losses", 1.001)), "resume: rank 0, losses"),
    "gradients kept twice": (FP32, _runs("main", _put("bytes", "gradients", 2 * 361728)), "memory: gradients"),
    "a layer that computed otherwise": (
        LION,
        _runs("main", _put("computed", "model.lm_head", {"fp32"})),
        "model.lm_head computed in fp32, not fp16",
    ),
    "state as the optimizer does not keep it": (LION, _runs("main", _set("state", {"fp16"})), "state was in fp16"),
    "weights that went too far": (
        LION,
        _runs("main", _further("model.lm_head.weight", 0.02)),
        "2.0e-02 of its way",
    ),
    "weights that are no numbers": (
        LION,
        _runs("main", _further("model.lm_head.weight", math.nan)),
        "inf of its way",
    ),
    "a tensor nobody has": (
        LION,
        _runs("main", lambda run: run.whole.pop("model.lm_head.weight")),
        "there is no",
    ),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_what_is_not_as_declared_differs_and_is_named(case: str) -> None:
    row, tamper, named = TAMPERED[case]
    verdict = _verdict(row, tamper)
    assert verdict.word == DIFFERS
    assert any(named in reason for reason in verdict.reasons), verdict.reasons
    assert not verdict.good


def test_half_precision_may_be_two_percent_off() -> None:
    def tamper(cells: list[Cell]) -> None:
        for name in ("main", "resumed"):
            _runs(name, _each("losses", 1.01))(cells)

    assert _verdict(SCALED, tamper).word == SAME


def test_a_norm_over_shards_counts_every_number_once() -> None:
    """Rank 0 holds one parameter whole, rank 1 another; a third is split, the rest lie on both."""
    cells, names = _cells(FP32), list(expected.whole(FP32))
    for step in range(STEPS):
        parts = [dict(cell.runs["main"].before[step]) for cell in cells]
        numbers, square = parts[0][names[2]]
        parts[0][names[0]] = parts[1][names[1]] = (0, 0.0)
        for part in parts:
            part[names[2]] = numbers // 2, square / 2
        for cell, part in zip(cells, parts, strict=True):
            cell.runs["main"].before = [part if i == step else p for i, p in enumerate(cell.runs["main"].before)]
    assert judge("ddp", FP32, cells, _main(FP32)).word == SAME


def test_weights_may_be_as_far_off_as_rounding_takes_a_plain_loop() -> None:
    cells, reference = _cells(LION), _main(LION)
    _runs("main", _further("model.lm_head.weight", 0.02))(cells)
    reference.sway = 0.05
    assert judge("ddp", LION, cells, reference).word == SAME


def _ended(word: str, reason: str, steps: int = 0) -> Callable[[Cell], None]:
    def end(cell: Cell) -> None:
        cell.word, cell.reason, cell.steps_begun = word, reason, steps

    return end


def test_a_refusal_on_every_rank_is_a_refusal() -> None:
    verdict = _verdict(FP32, lambda cells: [_ended(REFUSED, "because")(cell) for cell in cells])
    assert (verdict.word, verdict.reasons, verdict.good) == (REFUSED, ["because"], True)


def test_a_refusal_on_one_rank_alone_is_a_failure() -> None:
    assert _verdict(FP32, lambda cells: _ended(REFUSED, "because")(cells[1])).word == FAILED


def test_an_exception_in_a_step_is_a_failure() -> None:
    verdict = _verdict(FP32, lambda cells: [_ended(FAILED, "KeyError", 3)(cell) for cell in cells])
    assert verdict.word == FAILED
    assert "after 3 steps" in verdict.reasons[0]


def test_the_page_says_every_reason_once() -> None:
    refused, same = Verdict(REFUSED, ["not possible\nthere"]), _verdict(FP32)
    keys = [("ddp", "32-true"), ("ddp", "16-mixed"), ("fsdp1", "32-true"), ("fsdp1", "16-mixed")]
    page = report.text(Matrix(dict(zip(keys, [same, refused, refused, same], strict=True))))
    assert "| `32-true` | same | refused¹ |" in page
    assert "| `16-mixed` | refused¹ | same |" in page
    assert page.count("not possible there") == 1
    assert "4 cells: 2 the same, 2 refused, 0 otherwise" in page
