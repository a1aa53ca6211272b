"""What a person sees: progress, table and picture."""

from __future__ import annotations

import io
import math
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lightning_mp.demo.picture import draw, smooth
from lightning_mp.demo.progress import scale_text, view
from lightning_mp.demo.records import Reading, Result, Row
from lightning_mp.demo.shapes import Device
from lightning_mp.demo.table import print_table

CPU = Device("cpu", "a CPU", threads=2)
FP32 = Result("fp32", "float32", 100.0, 10240.0, 256.4, 5.5, 0, None, 1, 2)
FP16 = Result("fp16", "float16", 80.0, 12800.0, 128.0, 5.5125, 3, 2.0**17, 1, 2)


def _readings(count: int, scale: float | None = None, shift: float = 0.0) -> list[Reading]:
    return [Reading(step, 7 / step + shift, scale, 0, 1e-3, 0.1) for step in range(1, count + 1)]


def _table(rows: list[Row], width: int = 140, device: Device = CPU) -> str:
    output = io.StringIO()
    print_table(Console(file=output, width=width), rows, device, 5)
    return output.getvalue()


def _cells(table: str, mode: str) -> list[str]:
    return next(line.split() for line in table.splitlines() if line.split()[:1] == [mode])


def test_a_row_holds_the_figures_of_its_mode_and_their_relation_to_fp32() -> None:
    table = _table([Row("fp32", FP32), Row("fp16", FP16)])
    assert _cells(table, "fp32") == ["fp32", "100.0", "10,240", "1.00x", "256", "5.5000", "-", "0", "-"]
    assert _cells(table, "fp16") == ["fp16", "80.0", "12,800", "1.25x", "128", "5.5125", "+0.0125", "3", "2^17"]


def test_the_footnotes_say_what_the_figures_are() -> None:
    table = _table([Row("fp32", FP32), Row("fp16", FP16)])
    assert "most memory that tensors held at once in a step, as torch's profiler counted it" in " ".join(table.split())
    assert "fp16 float16" in table
    assert "the scale was halved" in table
    on_gpu = _table([Row("fp32", FP32)], device=Device("cuda", "a GPU", (9, 0), 80 * 2**30))
    assert "CUDA's allocator" in on_gpu
    assert "halved" not in on_gpu


def test_a_mode_that_did_not_run_keeps_its_row_and_says_why() -> None:
    table = _table([Row("fp32", FP32), Row("tf32", not_run="a CPU has no TF32"), Row("fp16", failed="OSError: gone")])
    assert _cells(table, "tf32") == ["tf32", *["-"] * 8, "not", "run:", "a", "CPU", "has", "no", "TF32"]
    assert _cells(table, "fp16")[9:] == ["failed:", "OSError:", "gone"]


def test_without_fp32_nothing_is_compared_with_it() -> None:
    table = _table([Row("fp16", FP16)])
    cells = _cells(table, "fp16")
    assert (cells[3], cells[6]) == ("-", "-")
    assert "fp32 is not among the modes that ran" in table


def test_the_table_fits_a_terminal_of_eighty_columns() -> None:
    rows = [
        Row("fp32", FP32),
        Row("tf32", not_run="a CPU has no TF32"),
        Row("bf16-ckpt", replace(FP16, step_ms=1234.5)),
    ]
    table = _table(rows, width=80)
    assert max(map(len, table.splitlines())) <= 80
    assert _cells(table, "bf16-ckpt")[1] == "1234.5"
    assert "tf32      not run: a CPU has no TF32" in table.splitlines()


def test_a_result_row_and_a_reason_row_say_their_status() -> None:
    done, missing = Row("fp16", FP16).to_dict(), Row("tf32", not_run="no").to_dict()
    assert (done["status"], done["reason"], done["skipped"]) == ("done", None, 3)
    assert missing == {"mode": "tf32", "status": "not run", "reason": "no"}


@pytest.mark.parametrize(("scale", "text"), [(65536.0, "2^16"), (0.5, "2^-1"), (1.0, "2^0"), (3000.0, "3000")])
def test_scales_read_as_powers_of_two(scale: float, text: str) -> None:
    assert scale_text(scale) == text


def test_away_from_a_terminal_there_is_a_line_every_tenth_and_no_control_character() -> None:
    output = io.StringIO()
    with view(Console(file=output, width=80)) as progress:
        progress.start("fp16", 30)
        for reading in _readings(30, scale=2.0**15):
            progress.step(reading)
        progress.note("tf32", "not run: no")
    lines = output.getvalue().splitlines()
    assert [line.split()[1] for line in lines[:-1]] == [f"{step}/30" for step in range(3, 31, 3)]
    assert all("scale 2^15  skipped 0" in line for line in lines[:-1])
    assert lines[-1] == "tf32      not run: no"
    assert not any(ord(character) < 32 for line in lines for character in line)


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_few_steps_give_a_line_each(steps: int) -> None:
    output = io.StringIO()
    with view(Console(file=output, width=80)) as progress:
        progress.start("fp32", steps)
        for reading in _readings(steps):
            progress.step(reading)
    assert len(output.getvalue().splitlines()) == steps


def test_on_a_terminal_there_is_a_bar_with_loss_and_scale() -> None:
    output = io.StringIO()
    with view(Console(file=output, width=100, force_terminal=True)) as progress:
        progress.start("fp16", 4)
        for reading in _readings(4, scale=2.0**15):
            progress.step(reading)
        progress.note("tf32", "not run: no")
    text = output.getvalue()
    assert "\x1b[" in text
    assert "4/4" in text
    assert "loss 1.750" in text
    assert "scale 2^15" in text
    assert "tf32      not run: no" in text


@pytest.mark.parametrize("scale", [None, 2.0**17])
def test_a_bar_keeps_its_count_and_its_time_on_eighty_columns(scale: float | None) -> None:
    output = io.StringIO()
    with view(Console(file=output, width=80, force_terminal=True, color_system=None)) as progress:
        progress.start("bf16-ckpt", 150)
        for reading in _readings(149, scale=scale):
            progress.step(replace(reading, skipped=13))
    last = [line for line in re.split(r"[\r\n]", output.getvalue()) if "149/150" in line][-1]
    assert re.search(r"149/150 (--|\d\d):(--|\d\d) loss 0\.047", last), last
    assert ("skipped 13" in last) == (scale is not None)


def _png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_the_picture_has_a_panel_for_the_scale_where_a_mode_has_one(tmp_path: Path) -> None:
    plain, scaled = tmp_path / "plain.png", tmp_path / "scaled.png"
    fp16 = [replace(reading, skipped=min(reading.step, 3)) for reading in _readings(20, scale=2.0**15, shift=0.1)]
    draw(plain, {"fp32": _readings(20), "bf16": _readings(20, shift=0.01)}, "a run")
    draw(scaled, {"fp32": _readings(20), "fp16": fp16, "bf16": []}, "a run")
    (width, height), (same_width, taller) = _png_size(plain), _png_size(scaled)
    assert width == same_width > 1000
    assert taller > height


@pytest.mark.parametrize("count", [1, 2])
def test_one_mode_or_one_step_or_a_loss_that_is_not_finite_still_gives_a_picture(tmp_path: Path, count: int) -> None:
    broken = [replace(reading, loss=math.nan) for reading in _readings(count, scale=1.0)]
    for name, histories in {
        "one.png": {"bf16": _readings(count)},
        "nan.png": {"fp32": _readings(count), "fp16": broken},
    }.items():
        draw(tmp_path / name, histories, "a run")
        assert _png_size(tmp_path / name)[0] > 1000


def test_smoothing_starts_at_the_first_value_and_leaves_gaps_where_there_is_none() -> None:
    smoothed = smooth([4.0, math.nan, 4.0, 2.0])
    assert smoothed[0] == pytest.approx(4.0)
    assert math.isnan(smoothed[1])
    assert smoothed[2] == pytest.approx(4.0)
    assert 2.0 < smoothed[3] < 4.0
    assert math.isnan(smooth([math.nan])[0])
