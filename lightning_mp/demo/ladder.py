"""The demo itself: prepare the text, run the modes one after the other, report."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.console import Console

from lightning_mp.demo.inputs import InputError, check_extras
from lightning_mp.demo.modes import LADDER, MODES, Mode, parse_modes, why_not
from lightning_mp.demo.progress import view
from lightning_mp.demo.quiet import quiet
from lightning_mp.demo.records import WARM_UP_STEPS, Failure, Job, Reading, Result, Row
from lightning_mp.demo.shapes import Device, Shape, find_device, shape_for
from lightning_mp.demo.table import print_table
from lightning_mp.demo.text import Text, from_path, standard_library
from lightning_mp.monitor.run_folder import REPORT
from lightning_mp.monitor.strict_json import to_json

if TYPE_CHECKING:
    from lightning_mp.demo.tokens import Corpus
    from lightning_mp.demo.worker import Processes

SEED = 1234
# Seconds of training that the default number of steps may take on a CPU, all modes together.
BUDGET = 100.0
MIN_STEPS = 20
_TIMED_STEPS = 4


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line takes. ``steps=None`` is the device's default."""

    text: Path | None = None
    modes: str = ",".join(mode.name for mode in LADDER)
    steps: int | None = None
    out: Path = Path("lightning_mp_demo")


@dataclass(frozen=True, slots=True)
class Setting:
    """What every mode has in common."""

    device: Device
    shape: Shape
    steps: int
    text: Text
    corpus: Corpus
    out: Path


@dataclass(frozen=True, slots=True)
class Report:
    """What a demo gave: a row a mode, in the order they ran, and the folder it was written to."""

    rows: tuple[Row, ...]
    out: Path

    @property
    def ok(self) -> bool:
        """Whether no mode failed."""
        return not any(row.failed for row in self.rows)


def run_demo(options: Options, console: Console) -> Report:
    """Train every mode, print progress and a table, and write metrics, summary, picture and report in ``options.out``.

    Raises:
        InputError: an option cannot be used; nothing was trained then.
        MissingExtraError: an optional package is missing; nothing was trained then.
        KeyboardInterrupt: the user stopped it; metrics written until then stay.
    """
    modes = _check(options)
    text = standard_library() if options.text is None else from_path(options.text)
    timing = ", timing a few steps" if options.steps is None else ""
    console.print(f"preparing: tokenizing the text{timing}", style="dim", highlight=False)
    from lightning_mp.demo.worker import Processes

    processes = Processes()
    setting = _setting(options, find_device(), text)
    if options.steps is None:
        setting = replace(setting, steps=affordable_steps(modes, setting, processes))
    _print_header(console, setting, shortened=options.steps is None and setting.steps < setting.shape.steps)
    setting.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    rows, histories = _train_all(modes, setting, processes, console)
    _write(setting, rows, histories)
    _print_end(console, setting, rows, histories, time.perf_counter() - start)
    return Report(tuple(rows), setting.out)


def _check(options: Options) -> list[Mode]:
    """All that can be refused before anything is read or loaded."""
    modes = parse_modes(options.modes)
    if options.steps is not None and options.steps < 1:
        raise InputError(f"--steps {options.steps}", "an integer >= 1", "leave it out for the default")
    check_extras()
    # Looked at, not made: what is refused later, a text too short for one, must leave nothing behind.
    out = options.out.absolute()
    nearest = next((folder for folder in (out, *out.parents) if folder.exists()), out)
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise InputError(f"--out {options.out}, which cannot be written", "a folder, new or not", "choose another")
    return modes


def _setting(options: Options, device: Device, text: Text) -> Setting:
    from lightning_mp.demo.tokens import cache_folder, make_corpus

    shape = shape_for(device)
    corpus = make_corpus(text, shape.vocab, shape.context, cache_folder())
    return Setting(device, shape, options.steps or shape.steps, text, corpus, options.out)


def affordable_steps(modes: Sequence[Mode], setting: Setting, processes: Processes) -> int:
    """The default number of steps, or as many as a slow CPU does in ``BUDGET``: a few steps of every mode tell."""
    if setting.device.kind != "cpu":
        return setting.steps
    seconds = 0.0
    with TemporaryDirectory(prefix="lightning_mp_") as folder:
        timed = replace(setting, steps=_TIMED_STEPS, out=Path(folder), shape=replace(setting.shape, val_batches=1))
        for mode in modes:
            if why_not(mode, setting.device) is None:
                outcome = processes.train(_job(mode, timed), setting.corpus, lambda reading: None)
                # A mode that fails here will fail again, and be reported, when its turn comes.
                seconds += 0.0 if isinstance(outcome, Failure) else outcome.step_ms / 1000
    affordable = int(BUDGET / seconds) if seconds else setting.steps
    return min(setting.steps, max(MIN_STEPS, affordable // 10 * 10))


def _train_all(
    modes: Sequence[Mode], setting: Setting, processes: Processes, console: Console
) -> tuple[list[Row], dict[str, list[Reading]]]:
    rows: list[Row] = []
    histories: dict[str, list[Reading]] = {}
    with view(console) as progress:
        for mode in modes:
            reason = why_not(mode, setting.device)
            if reason is not None:
                progress.note(mode.name, f"not run: {reason}")
                rows.append(Row(mode.name, not_run=reason))
                continue
            history = histories.setdefault(mode.name, [])

            def report(reading: Reading, history: list[Reading] = history) -> None:
                history.append(reading)
                progress.step(reading)

            progress.start(mode.name, setting.steps)
            rows.append(_row(mode, processes.train(_job(mode, setting), setting.corpus, report), setting.out))
            if rows[-1].failed:
                progress.note(mode.name, f"failed: {rows[-1].failed}")
    return rows, histories


def _job(mode: Mode, setting: Setting) -> Job:
    return Job(
        mode=mode.name,
        shape=setting.shape,
        steps=setting.steps,
        seed=SEED,
        device=setting.device.kind,
        folder=(setting.out / mode.name).resolve(),
    )


def _row(mode: Mode, outcome: Result | Failure, out: Path) -> Row:
    error = out / mode.name / "error.txt"
    error.unlink(missing_ok=True)
    if isinstance(outcome, Failure):
        error.parent.mkdir(exist_ok=True)
        error.write_text(outcome.details, encoding="utf-8")
        return Row(mode.name, failed=f"{outcome.reason} (see {error})")
    return Row(mode.name, result=outcome)


def _write(setting: Setting, rows: Sequence[Row], histories: dict[str, list[Reading]]) -> None:
    from lightning_mp.demo.picture import draw
    from lightning_mp.monitor.report import write_report

    shape, corpus = setting.shape, setting.corpus
    summary = {
        "device": asdict(setting.device),
        "python": platform.python_version(),
        "torch": version("torch"),
        "lightning": version("lightning"),
        "text": {"source": setting.text.source, "bytes": setting.text.size, "sha256": corpus.digest},
        "tokens": {"train": int(corpus.train.size), "validation": int(corpus.val.size), "cached": corpus.cached},
        "model": {**asdict(shape), "parameters": shape.parameters},
        "steps": setting.steps,
        "seed": SEED,
        "modes": [{**row.to_dict(), "plan": MODES[row.mode].code} for row in rows],
    }
    (setting.out / "summary.json").write_text(to_json(summary, indent=2) + "\n", encoding="utf-8")
    if any(histories.values()):
        with quiet():
            draw(setting.out / "demo.png", histories, _title(setting))
        write_report(
            [setting.out / mode for mode, history in histories.items() if history],
            setting.out / REPORT,
            title=("One model in every precision", _title(setting)),
            not_run={row.mode: row.not_run or row.failed or "" for row in rows if row.result is None},
        )


def _title(setting: Setting) -> str:
    shape = setting.shape
    size = f"{shape.parameters / 1e6:.1f}M parameters"
    return f"GPT-2, {size}, {setting.steps} steps of {shape.batch} x {shape.context} tokens, {setting.device.name}"


def _print_header(console: Console, setting: Setting, shortened: bool) -> None:
    shape, corpus = setting.shape, setting.corpus
    tokens = int(corpus.train.size + corpus.val.size)
    run = f"{setting.steps} steps of {shape.batch} x {shape.context} tokens a mode, every mode from the same weights"
    lines = [
        f"device  {setting.device}",
        f"model   GPT-2 with {shape.layers} layers of width {shape.width}, {shape.parameters / 1e6:.1f}M parameters",
        f"text    {setting.text.source}",
        f"tokens  {tokens:,}{' (cached)' if corpus.cached else ''}, the last {corpus.val.size:,} for validation",
        f"run     {run} on the same batches",
    ]
    if shortened:
        lines.append(f"note    {setting.shape.steps} steps would take too long here; --steps sets another number")
    if setting.device.slow_half:
        lines.append("note    this CPU emulates fp16, so the model is smaller than usual and fp16 and bf16 are slow")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print()


def _print_end(
    console: Console, setting: Setting, rows: Sequence[Row], histories: dict[str, list[Reading]], seconds: float
) -> None:
    console.print()
    print_table(console, rows, setting.device, min(WARM_UP_STEPS, setting.steps // 2))
    console.print()
    done = [row.mode for row in rows if row.result]
    lines = [f"{len(done)} of {len(rows)} modes ran, in {seconds:.0f} s. In {setting.out}{os.sep}:"]
    if any(histories.values()):
        lines.append(f"  {REPORT}            every mode compared, to open in a browser")
        lines.append("  demo.png               loss curves, and the loss scale over the steps")
    lines.append("  summary.json           the table in full, and what it was measured on")
    lines.append("  <mode>/metrics.jsonl   every step of a mode")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
