"""The table at the end: what each mode cost and what it gave, with every figure's meaning below it."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_mp.demo.progress import scale_text
from lightning_mp.demo.records import Result, Row
from lightning_mp.demo.shapes import Device

NOTHING = "-"
# Below this a column of notes would be too narrow to read; they go under the table then.
_WIDTH_WITH_NOTES = 100
_COLUMNS = (
    "step\nms",
    "tokens\nper s",
    "speed\nvs fp32",
    "peak\nMiB",
    "val\nloss",
    "loss -\nfp32",
    "steps\nskipped",
    "final\nscale",
)


def print_table(console: Console, rows: Sequence[Row], device: Device, warm_up: int) -> None:
    """Print a row a mode, those that did not run included, and the footnotes."""
    baseline = next((row.result for row in rows if row.mode == "fp32" and row.result), None)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("mode", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    inside = console.width >= _WIDTH_WITH_NOTES and any(row.result is None for row in rows)
    if inside:
        table.add_column("note", overflow="fold")
    for row in rows:
        cells = _figures(row.result, baseline) if row.result else [NOTHING] * len(_COLUMNS)
        table.add_row(row.mode, *cells, *([_note(row)] if inside else []))
    console.print(table, highlight=False, markup=False)
    notes = [] if inside else [(row.mode, _note(row)) for row in rows if row.result is None]
    for name, meaning in notes + _footnotes(rows, device, baseline, warm_up):
        lines = wrap(f"{name:<10}{meaning}", min(console.width - 1, 100), subsequent_indent=" " * 10)
        console.print("\n".join(lines), highlight=False, markup=False, style="dim")


def _figures(result: Result, baseline: Result | None) -> list[str]:
    speed = f"{baseline.step_ms / result.step_ms:.2f}x" if baseline else NOTHING
    difference = f"{result.val_loss - baseline.val_loss:+.4f}" if baseline and baseline is not result else NOTHING
    return [
        f"{result.step_ms:.1f}",
        f"{result.tokens_per_s:,.0f}",
        speed,
        f"{result.peak_mib:,.0f}",
        f"{result.val_loss:.4f}",
        difference,
        str(result.skipped),
        NOTHING if result.final_scale is None else scale_text(result.final_scale),
    ]


def _note(row: Row) -> str:
    if row.failed:
        return f"failed: {row.failed}"
    return f"not run: {row.not_run}" if row.not_run else ""


def _footnotes(rows: Sequence[Row], device: Device, baseline: Result | None, warm_up: int) -> list[tuple[str, str]]:
    """What the columns mean, as (column, meaning)."""
    left_out = f", the first {warm_up} left out" if warm_up else ""
    lines = [("step", f"median, the reading of the loss included{left_out}")]
    counted = "CUDA's allocator" if device.kind == "cuda" else "torch's profiler"
    lines.append(("peak", f"most memory that tensors held at once in a step, as {counted} counted it"))
    seen = [f"{row.mode} {row.result.compute_dtype}" for row in rows if row.result]
    if seen:
        lines.append(("dtypes", f"seen coming out of attention's matrix product: {', '.join(seen)}"))
    if any(row.result and row.result.skipped for row in rows):
        lines.append(("skipped", "the scaled gradients overflowed fp16: nothing was updated, and the scale was halved"))
    if baseline is None:
        lines.append(("vs fp32", "unknown: fp32 is not among the modes that ran"))
    return lines
