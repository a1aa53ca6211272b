"""Scale and skips as the three keepers of a scale have them, beside what they tell themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.amp import GradScaler

from lightning_mp import LossScaling
from lightning_mp.monitor.health.scale_sources import (
    DeepSpeedSource,
    PlanSource,
    ScaleSource,
    SkipCount,
    StockSource,
)
from lightning_mp.monitor.health.to_host import ToHost
from lightning_mp.numerics.loss_scale import LossScaler
from support.counting import HostReads
from support.loops import FUSED, OPTIMIZERS, backward, net

CPU = torch.device("cpu")
#: torch's fused SGD reads uninitialised momentum after a skipped first step
SOUND = [name for name in OPTIMIZERS if name != "SGD with momentum"]
traces = st.lists(st.booleans(), min_size=1, max_size=12)


def expected(trace: list[bool]) -> list[tuple[int, int]]:
    """Skips in total and in a row after each step."""
    found, total, row = [], 0, 0
    for skipped in trace:
        total, row = total + skipped, (row + 1) * skipped
        found.append((total, row))
    return found


def counted(source: ScaleSource) -> SkipCount:
    return SkipCount(source.skipped, source if isinstance(source, StockSource) else None)


def followed(source: ScaleSource, scaler: GradScaler, optimizer: str, trace: list[bool], after: Any = None) -> Any:
    """Total and row after each step of a plain loop."""
    model = net()
    stepped, skips, found = OPTIMIZERS[optimizer](model.parameters()), counted(source), []
    to_host = ToHost(CPU)
    for step, overflow in enumerate(trace):
        stepped.zero_grad()
        backward(model, scaler, step, overflow)
        skips.before_step()
        scaler.step(stepped)
        scaler.update()
        if after is not None:
            after(overflow)
        skips.after_batch()
        values = to_host.read({"total": skips.total, "row": skips.in_a_row})
        found.append((values["total"], values["row"]))
    assert skips.attempts == len(trace)
    return found


@pytest.mark.parametrize("optimizer", SOUND)
@settings(max_examples=10)
@given(trace=traces)
def test_torchs_scaler_skips_where_its_scale_falls(optimizer: str, trace: list[bool]) -> None:
    """Also where it grows in between: an interval of 1 undoes every backoff at once."""
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    source = StockSource(scaler, CPU)
    assert followed(source, scaler, optimizer, trace) == expected(trace)
    state, scale = scaler.state_dict(), source.scale()
    assert (float(scale.scale), int(scale.growth_tracker)) == (state["scale"], state["_growth_tracker"])
    assert (scale.hysteresis, scale.floor) == (None, 0.0)


def test_a_scale_of_zero_cannot_fall_and_skips_all_the_same() -> None:
    scaler = GradScaler("cpu", init_scale=2.0**-148)
    assert followed(StockSource(scaler, CPU), scaler, "SGD", [True] * 4)[-1] == (4, 4)


@settings(max_examples=10)
@given(trace=traces)
def test_the_plans_scaler_and_its_counts(trace: list[bool]) -> None:
    scaler = LossScaler(LossScaling.megatron(initial_scale=2.0**10, growth_interval=3, hysteresis=2))
    source = PlanSource(scaler)
    assert followed(source, scaler, "AdamW", trace) == expected(trace)
    scale, state = source.scale(), scaler.state_dict()
    assert scale is not None
    assert float(scale.scale) == state["scale"]
    assert scale.hysteresis is not None
    assert int(scale.hysteresis) == state["hysteresis_left"]
    assert scale.floor == scaler.config.floor


def test_a_plan_without_scaling_has_skips_and_no_scale() -> None:
    assert PlanSource(LossScaler()).scale() is None


def test_nothing_is_read_to_count() -> None:
    scaler, model = GradScaler("cpu", init_scale=4.0), net()
    optimizer, skips = FUSED["SGD"](model.parameters()), counted(StockSource(scaler, CPU))
    for step in range(3):
        optimizer.zero_grad()
        backward(model, scaler, step, step == 1)
        with HostReads() as reads:
            skips.before_step()
        scaler.step(optimizer)
        scaler.update()
        with reads:
            skips.after_batch()
    assert reads.count == 0
    assert float(skips.total) == 1.0


class Engine:
    """A ``DeepSpeedEngine`` as far as it is asked, around DeepSpeed's own scaler."""

    def __init__(self, scaler: Any, fp16: bool = True) -> None:
        self.optimizer = type("Optimizer", (), {"loss_scaler": scaler})()
        self.skipped_steps, self._fp16 = 0, fp16

    def fp16_enabled(self) -> bool:
        return self._fp16


@settings(max_examples=20)
@given(trace=traces)
def test_deepspeeds_own_scaler(trace: list[bool]) -> None:
    host = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    window = 3
    scaler = host.DynamicLossScaler(2.0**10, window, 2.0, 2, False, raise_error_at_min_scale=False)
    engine, clean = Engine(scaler), 0
    skips = counted(DeepSpeedSource(engine))
    for overflow, counts in zip(trace, expected(trace), strict=True):
        skips.before_step()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(host.dist, "get_rank", lambda: 1)  # it asks who is to print
            scaler.update_scale(overflow)
        engine.skipped_steps += overflow
        skips.after_batch()
        clean = 0 if overflow else clean + 1
        assert (skips.total, skips.in_a_row) == counts
        scale = DeepSpeedSource(engine).scale()
        assert scale is not None
        assert (scale.scale, scale.growth_tracker) == (scaler.cur_scale, clean % window)
        assert (scale.hysteresis, scale.floor) == (scaler.cur_hysteresis, 2.0)


def test_deepspeed_without_fp16_scales_nothing() -> None:
    host = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    assert DeepSpeedSource(Engine(host.LossScaler(1.0), fp16=False)).scale() is None


def test_several_optimizers_in_a_batch_are_one_in_a_row() -> None:
    """A batch is skipped where none of its steps was applied."""
    scaler, optimizer = LossScaler(), FUSED["SGD"](net().parameters())
    skips = counted(PlanSource(scaler))
    seen = []
    for batch in ((1, 1), (1, 0), (0, 0), (1, 1), (1, 1)):
        for flag in batch:
            skips.before_step()
            scaler.note_step(optimizer, torch.tensor(float(flag)))
        skips.after_batch()
        seen.append((float(skips.total), float(skips.in_a_row), bool(skips.skipped_last)))
    assert seen == [(2, 2, True), (3, 0, False), (3, 0, False), (5, 2, True), (7, 4, True)]
