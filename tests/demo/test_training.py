"""One mode: what it declares is what runs, and every mode starts from the same weights and sees the same batches."""

from __future__ import annotations

import json
import logging
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from demo.tiny import SHAPE, corpus, job
from lightning_mp.comparison.run import quiet
from lightning_mp.demo.modes import FP16_INIT_SCALE, LADDER, MODES, parse_modes, why_not
from lightning_mp.demo.records import Reading, Result
from lightning_mp.demo.shapes import CPU_SHAPE, SLOW_CPU_SHAPE, Device, Shape, find_device, shape_for
from lightning_mp.demo.training import GPT2, train_mode, train_windows, val_windows

RUN_ON_CPU = [mode.name for mode in LADDER if why_not(mode, Device("cpu", "a CPU")) is None]


def _train(mode: str, folder: Path, steps: int = 4) -> tuple[Result, list[Reading]]:
    readings: list[Reading] = []
    return train_mode(job(mode, folder / mode, steps), corpus(), readings.append), readings


def _strict(line: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(line, parse_constant=refuse)


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Result, list[Reading]]]:
    folder = tmp_path_factory.mktemp("ladder")
    return {mode: _train(mode, folder) for mode in RUN_ON_CPU}


def test_matrix_products_come_out_in_the_declared_format(ladder: dict[str, tuple[Result, list[Reading]]]) -> None:
    seen = {mode: result.compute_dtype for mode, (result, _) in ladder.items()}
    assert seen == {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "bf16-ckpt": "bfloat16"}


def test_every_mode_has_the_same_weights_and_batches(ladder: dict[str, tuple[Result, list[Reading]]]) -> None:
    assert len({(result.init_crc, result.data_crc) for result, _ in ladder.values()}) == 1
    first = [readings[0].loss for _, readings in ladder.values()]
    assert first[0] == pytest.approx(math.log(SHAPE.vocab), abs=0.2)
    assert first == pytest.approx([first[0]] * len(first), abs=5e-3)


def test_checkpointing_changes_memory_and_not_one_bit_of_the_loss(
    ladder: dict[str, tuple[Result, list[Reading]]],
) -> None:
    (plain, plain_readings), (checkpointed, checkpointed_readings) = ladder["bf16"], ladder["bf16-ckpt"]
    assert [reading.loss for reading in plain_readings] == [reading.loss for reading in checkpointed_readings]
    assert plain.val_loss == checkpointed.val_loss


def test_only_fp16_has_a_loss_scale(ladder: dict[str, tuple[Result, list[Reading]]]) -> None:
    for mode, (result, readings) in ladder.items():
        scaled = mode == "fp16"
        assert (result.final_scale is not None) is scaled
        assert all((reading.scale is not None) is scaled for reading in readings)


def test_fp16_finds_its_scale_skips_on_the_way_and_holds_the_rate(tmp_path: Path) -> None:
    result, readings = _train("fp16", tmp_path, steps=30)
    rates = [reading.lr for reading in _train("fp32", tmp_path, steps=30)[1]]
    scale, skipped = FP16_INIT_SCALE, 0
    for reading in readings:
        assert reading.scale is not None
        assert reading.scale in ({scale / 2} if reading.skipped > skipped else {scale, 2 * scale})
        assert reading.lr == rates[reading.step - 1 - skipped]  # a skipped step does not move the schedule
        scale, skipped = reading.scale, reading.skipped
    assert result.skipped == skipped > 0
    assert result.final_scale == scale


def test_training_learns(tmp_path: Path) -> None:
    result, readings = _train("fp32", tmp_path, steps=60)
    assert result.val_loss < readings[0].loss - 0.3


def test_metrics_are_strict_json_with_a_line_a_step_and_the_validation_last(tmp_path: Path) -> None:
    result, readings = _train("fp16", tmp_path)
    lines = [_strict(line) for line in (tmp_path / "fp16" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4]
    assert all(next(iter(line)) == "step" for line in lines)
    names = {"step", "train/loss", "health/loss_scale", "health/skipped_steps", "health/lr", "health/tokens_per_s"}
    for line, reading in zip(lines, readings, strict=False):
        assert set(line) == names
        assert line["train/loss"] == reading.loss
        assert line["health/loss_scale"] == reading.scale
        assert line["health/skipped_steps"] == reading.skipped
    assert lines[-1] == {
        "step": 4,
        "val/loss": result.val_loss,
        "health/memory_peak_gib": pytest.approx(result.peak_mib / 1024),
    }


def test_a_mode_without_scaling_writes_null_for_its_scale(tmp_path: Path) -> None:
    _train("bf16", tmp_path, steps=1)
    first = _strict((tmp_path / "bf16" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["health/loss_scale"] is None


def test_training_leaves_loggers_filters_random_numbers_and_tf32_as_they_were(tmp_path: Path) -> None:
    names = ("lightning.pytorch", "lightning.fabric", "transformers", "matplotlib")
    before = [logging.getLogger(name).level for name in names], list(warnings.filters)
    state, tf32 = torch.get_rng_state(), torch.get_float32_matmul_precision()
    GPT2(SHAPE, 1, 0)
    assert torch.equal(torch.get_rng_state(), state)
    _train("bf16-ckpt", tmp_path, steps=1)
    assert ([logging.getLogger(name).level for name in names], list(warnings.filters)) == before
    assert torch.get_float32_matmul_precision() == tf32


def test_quiet_restores_after_an_error_too() -> None:
    logger = logging.getLogger("lightning.pytorch")
    level, filters = logger.level, list(warnings.filters)
    levels: list[int] = []

    def fail() -> None:
        with quiet():
            levels.append(logger.level)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert levels[0] >= logging.ERROR
    assert (logger.level, list(warnings.filters)) == (level, filters)


def test_windows_are_the_same_for_a_seed_and_stay_inside_the_tokens() -> None:
    tokens = corpus().train
    windows = train_windows(tokens, SHAPE, 5, 7)
    assert len(windows) == 5 * SHAPE.batch
    assert windows.shape[1:] == (17,)
    assert torch.equal(windows, train_windows(tokens, SHAPE, 5, 7))
    assert not torch.equal(windows, train_windows(tokens, SHAPE, 5, 8))


def test_validation_windows_lie_side_by_side() -> None:
    tokens = corpus().val
    windows = val_windows(tokens, SHAPE)
    assert len(windows) == SHAPE.val_batches * SHAPE.batch
    assert windows[1][0] == windows[0][-1] == tokens[SHAPE.context]


@pytest.mark.parametrize("shape", [SHAPE, SLOW_CPU_SHAPE], ids=["tiny", "slow"])
def test_a_shape_knows_its_parameters(shape: Shape) -> None:
    assert shape.parameters == sum(parameter.numel() for parameter in GPT2(shape, 1, 0).parameters())


def test_shapes_suit_the_device() -> None:
    assert shape_for(Device("cpu", "a CPU")) == CPU_SHAPE
    assert 2e6 < CPU_SHAPE.parameters < 3e6
    assert shape_for(Device("cpu", "an old CPU", slow_half=True)) == SLOW_CPU_SHAPE
    small = shape_for(Device("cuda", "a GPU", (7, 5), 16 * 2**30))
    large = shape_for(Device("cuda", "a GPU", (9, 0), 80 * 2**30))
    assert small == replace(large, batch=small.batch)
    assert small.batch < large.batch
    assert large.parameters == pytest.approx(124e6, rel=0.01)


def test_the_device_found_is_the_one_torch_has() -> None:
    device = find_device()
    assert device.kind == ("cuda" if torch.cuda.is_available() else "cpu")
    assert device.name


def test_tf32_runs_where_the_device_has_it_and_says_why_not_elsewhere() -> None:
    tf32 = MODES["tf32"]
    assert why_not(tf32, Device("cpu", "a CPU")) == "a CPU has no TF32"
    assert "this is 7.5" in str(why_not(tf32, Device("cuda", "T4", (7, 5), 16 * 2**30)))
    assert why_not(tf32, Device("cuda", "A100", (8, 0), 40 * 2**30)) is None


def test_modes_are_taken_in_the_order_given_each_once() -> None:
    assert [mode.name for mode in parse_modes(" bf16, fp32 ,bf16,")] == ["bf16", "fp32"]


def test_the_plan_printed_for_a_mode_is_the_plan_that_runs() -> None:
    import lightning_mp

    for mode in LADDER:
        assert eval(mode.code, vars(lightning_mp) | _public(lightning_mp)).policy == mode.plan().policy


def _public(package: Any) -> dict[str, Any]:
    return {name: getattr(package, name) for name in package.__all__}
