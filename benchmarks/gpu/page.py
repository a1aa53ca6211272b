"""The results as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def markdown(results: dict[str, Any]) -> str:
    """The page: the machine, and a section a part; a part that failed says how."""
    machine = results["machine"]
    versions = ", ".join(
        f"{name} {value}" for name, value in machine.items() if value and name not in ("date", "device")
    )
    lines = ["# On a GPU", ""]
    if results["quick"]:
        lines += ["A smoke run with tiny models: **these figures mean nothing.**", ""]
    lines += [f"{machine['date']}, {machine['device']}; {versions}.", ""]
    lines += ["Written by `python -m benchmarks.gpu --out DIR`, which runs from a plain checkout.", ""]
    for name, part in results["parts"].items():
        lines += [f"## {_TITLES[name]}", "", *_SECTIONS[name](part["figures"]), ""]
        if not part["ok"]:
            lines += ["This part did not end well:", "", "```text", part["error"].strip(), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    if rows:
        yield f"| {' | '.join(head)} |"
        yield f"|{' --- |' * len(head)}"
        yield from (f"| {' | '.join(map(str, row))} |" for row in rows)


def _tests(figures: dict[str, Any]) -> Iterator[str]:
    outcomes = ("passed", "failed", "skipped")
    files: dict[str, dict[str, int]] = figures.get("files", {})
    yield from _table(
        ("file", *outcomes), [(f"`{file}`", *(counts.get(o, 0) for o in outcomes)) for file, counts in files.items()]
    )
    if figures.get("failed"):
        yield ""
        yield from (f"- `{failed}`" for failed in figures["failed"])


def _sync(figures: dict[str, Any]) -> Iterator[str]:
    rows = [
        (f"`{mode}`", row["steps"], f"yes: {row['error']}" if row["waited"] else "no") for mode, row in figures.items()
    ]
    yield from _table(("mode", "warm steps", "waited for the device"), rows)


def _ladder(figures: dict[str, Any]) -> Iterator[str]:
    base = figures.get("fp32", {}).get("tokens_per_s")
    rows = [
        (
            name,
            f"{row['ms']:.1f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['tokens_per_s'] / base:.2f}x" if base else "-",
            _number(row["peak_gib"], ".2f"),
            f"{row['loss']:.4f}",
            row["skipped"],
        )
        for name, row in figures.items()
    ]
    yield from _table(("mode", "step, ms", "tokens / s", "vs fp32", "peak, GiB", "last loss", "skipped"), rows)


def _overhead(figures: dict[str, Any]) -> Iterator[str]:
    rows = [
        (
            f"`{mode}`",
            *(f"{row[f'{side}_ms']:.2f} ms" for side in ("loop", "stock", "plan")),
            *(f"{row[f'plan/{side}']:.3f}" for side in ("stock", "loop")),
        )
        for mode, row in figures.items()
    ]
    yield from _table(("mode", "loop by hand", "stock Lightning", "plan", "plan / stock", "plan / loop"), rows)


def _mfu(figures: dict[str, Any]) -> Iterator[str]:
    rows = [
        (
            name,
            f"{row['parameters'] / 1e9:.2f}e9",
            f"{row['ms']:.1f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['tflops']:.0f}",
            _number(row["mfu"], ".1%"),
            row["peak"] or "-",
        )
        for name, row in figures.items()
    ]
    yield from _table(("", "parameters", "step, ms", "tokens / s", "TFLOP/s", "MFU", "of"), rows)
    if rows:
        yield ""
        yield "FLOPs a token are 6 N + 12 L h s (MosaicML's convention), recomputation not counted."


def _fp8(figures: dict[str, Any]) -> Iterator[str]:
    base = figures.get("bf16", {}).get("tokens_per_s")
    rows = [
        (
            name,
            row["layers"],
            f"{row['ms']:.1f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['tokens_per_s'] / base:.2f}x" if base else "-",
            _number(row["peak_gib"], ".2f"),
            f"{row['loss']:.4f}",
        )
        for name, row in figures.items()
    ]
    yield from _table(("", "layers in FP8", "step, ms", "tokens / s", "vs bf16", "peak, GiB", "last loss"), rows)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


_TITLES = {
    "tests": "The CUDA tests",
    "sync": "Nothing waits for the device",
    "ladder": "The ladder of modes, GPT-2 small",
    "overhead": "What the plan costs, GPT-2 small",
    "mfu": "Model FLOPs utilisation, Llama of 1.1B parameters",
    "fp8": "FP8, layers of Llama 8B's shapes, compiled",
}
_SECTIONS = {"tests": _tests, "sync": _sync, "ladder": _ladder, "overhead": _overhead, "mfu": _mfu, "fp8": _fp8}
