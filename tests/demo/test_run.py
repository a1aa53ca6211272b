"""The command from end to end, as a newcomer starts it with its output in a pipe: files, table, nothing on stderr."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

#: a shell that ignores SIGINT, as for a job in the background, hands that on to what it starts
INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
COMMAND = [sys.executable, "-c", f"{INTERRUPTIBLE}; from lightning_mp.cli import main; main()", "demo"]
RAN = ("fp32", "fp16", "bf16", "bf16-ckpt")


@dataclass
class Finished:
    """What a run left."""

    out: Path
    stdout: str
    stderr: str
    status: int
    summary: dict[str, Any]

    def metrics(self, mode: str) -> list[dict[str, Any]]:
        """The readings of a mode."""
        lines = (self.out / mode / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line, parse_constant=_refuse) for line in lines]

    def row(self, mode: str) -> list[str]:
        """The cells of a mode's row."""
        table = self.stdout[self.stdout.index("─") :]
        return next(line.split() for line in table.splitlines() if line.split()[:1] == [mode])


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _environment(folder: Path) -> dict[str, str]:
    """On the CPU wherever the tests run, with a cache of its own; the packages of this checkout first."""
    root = str(Path(__file__).parents[2])
    return {
        **{name: value for name, value in os.environ.items() if name != "COLUMNS"},
        "CUDA_VISIBLE_DEVICES": "",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTHONPATH": root,
        "PYTHONIOENCODING": "utf-8",
    }


def _demo(folder: Path, *arguments: str, name: str = "out") -> Finished:
    out = folder / name
    done = subprocess.run(
        [*COMMAND, "--text", str(folder / "text"), "--out", str(out), *arguments],
        env=_environment(folder),
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=200,
    )
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"), parse_constant=_refuse)
    return Finished(out, done.stdout, done.stderr, done.returncode, summary)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text: some of this package's own sources, since a longer one is only validated for longer."""
    folder = tmp_path_factory.mktemp("demo")
    sources = Path(__file__).parents[2] / "lightning_mp" / "numerics"
    shutil.copytree(sources, folder / "text", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def ladder(folder: Path) -> Finished:
    return _demo(folder, "--steps", "4")


def test_it_succeeds_without_a_word_on_stderr(ladder: Finished) -> None:
    assert ladder.stderr == ""
    assert ladder.status == 0


def test_a_pipe_gets_plain_lines(ladder: Finished) -> None:
    assert not any(ord(character) < 32 for character in ladder.stdout.replace("\n", ""))
    for mode in RAN:
        steps = [line.split()[1] for line in ladder.stdout.splitlines() if line.startswith(f"{mode} ")]
        assert steps[:4] == ["1/4", "2/4", "3/4", "4/4"]


def test_it_ends_by_saying_where_the_files_are(ladder: Finished) -> None:
    end = ladder.stdout[ladder.stdout.index("4 of 5 modes ran") :]
    assert str(ladder.out) in end
    for name in ("report.html", "demo.png", "summary.json", "metrics.jsonl"):
        assert name in end


def test_every_mode_has_a_row_and_tf32_says_why_it_did_not_run(ladder: Finished) -> None:
    assert " ".join(ladder.row("tf32")).endswith("not run: a CPU has no TF32")
    (tf32,) = [mode for mode in ladder.summary["modes"] if mode["mode"] == "tf32"]
    assert (tf32["status"], tf32["reason"]) == ("not run", "a CPU has no TF32")
    assert not (ladder.out / "tf32").exists()
    for mode in RAN:
        assert len(ladder.row(mode)) == 9


def test_table_summary_and_metrics_tell_the_same(ladder: Finished) -> None:
    results = {mode["mode"]: mode for mode in ladder.summary["modes"] if mode["status"] == "done"}
    assert tuple(results) == RAN
    for name, result in results.items():
        row, lines = ladder.row(name), ladder.metrics(name)
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 4]
        assert lines[-1]["val/loss"] == result["val_loss"]
        assert lines[-2]["health/skipped_steps"] == result["skipped"]
        assert lines[-2]["health/loss_scale"] == result["final_scale"]
        assert row[1] == f"{result['step_ms']:.1f}"
        assert row[5] == f"{result['val_loss']:.4f}"
        assert row[7] == str(result["skipped"])
        assert lines[-1]["health/memory_peak_gib"] == pytest.approx(result["peak_mib"] / 1024)
        if name != "fp32":
            assert row[6] == f"{result['val_loss'] - results['fp32']['val_loss']:+.4f}"
            assert row[3] == f"{results['fp32']['step_ms'] / result['step_ms']:.2f}x"


def test_half_precision_needs_less_memory_and_checkpointing_less_still(ladder: Finished) -> None:
    peak = {mode["mode"]: mode["peak_mib"] for mode in ladder.summary["modes"] if mode["status"] == "done"}
    assert peak["bf16-ckpt"] < peak["bf16"] < peak["fp32"]
    assert peak["fp16"] == pytest.approx(peak["bf16"], rel=0.02)


def test_all_modes_start_from_the_same_weights_and_see_the_same_batches(ladder: Finished) -> None:
    results = [mode for mode in ladder.summary["modes"] if mode["status"] == "done"]
    assert len({(mode["init_crc"], mode["data_crc"]) for mode in results}) == 1
    first = [ladder.metrics(mode)[0]["train/loss"] for mode in RAN]
    assert first == pytest.approx([first[0]] * len(first), abs=0.01)


def test_fp16_is_fp16_with_a_scaler_that_skips_and_halves(ladder: Finished) -> None:
    (fp16,) = [mode for mode in ladder.summary["modes"] if mode["mode"] == "fp16"]
    assert fp16["compute_dtype"] == "float16"
    assert "growth_interval" in fp16["plan"]
    first, second = ladder.metrics("fp16")[:2]
    # The demo's first scale is meant to overflow: that step is skipped, and the learning rate waits for it.
    assert first["health/skipped_steps"] == 1
    assert first["health/loss_scale"] == 2.0**19
    assert second["health/lr"] == first["health/lr"]
    assert all(line["health/loss_scale"] is None for line in ladder.metrics("bf16")[:-1])


def test_there_is_a_picture(ladder: Finished) -> None:
    assert (ladder.out / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_there_is_a_report_that_compares_every_mode_that_ran(ladder: Finished) -> None:
    page = (ladder.out / "report.html").read_text(encoding="utf-8")
    assert "<h1>One model in every precision</h1>" in page
    assert "tf32</strong> did not run: a CPU has no TF32" in page
    assert "Not in this report" not in page
    assert "Loss minus the first run" in page
    for mode in RAN:
        assert f'data-hide="run {RAN.index(mode)}"' in page
        about = json.loads((ladder.out / mode / "run.json").read_text(encoding="utf-8"), parse_constant=_refuse)
        assert about["status"] == "finished"
        written = {"metrics.jsonl", "run.json", "audit.json", "audit.md"}
        assert {path.name for path in (ladder.out / mode).iterdir()} == written
        assert json.loads((ladder.out / mode / "audit.json").read_text(encoding="utf-8"))["ok"] is True
    fp16 = json.loads((ladder.out / "fp16" / "run.json").read_text(encoding="utf-8"))
    assert fp16["plan"]["precision"] == "16-mixed"


def test_a_second_run_reads_its_tokens_from_the_cache(ladder: Finished, folder: Path) -> None:
    again = _demo(folder, "--steps", "1", "--modes", "bf16")
    assert (again.status, again.stderr) == (0, "")
    assert (ladder.summary["tokens"]["cached"], again.summary["tokens"]["cached"]) == (False, True)
    assert "(cached)" in again.stdout
    assert again.summary["text"] == ladder.summary["text"]
    assert "fp32 is not among the modes that ran" in again.stdout
    # What another run left for other modes is still there.
    assert len(again.metrics("fp32")) == 5
    assert len(again.metrics("bf16")) == 2


@pytest.mark.slow
def test_a_mode_that_fails_has_its_reason_in_its_row_and_the_others_run(folder: Path) -> None:
    in_the_way = folder / "partly" / "fp32" / "metrics.jsonl"
    in_the_way.mkdir(parents=True)
    run = _demo(folder, "--steps", "1", "--modes", "fp32,bf16", name="partly")
    assert run.status == 1
    assert "Traceback" not in run.stdout + run.stderr
    fp32, bf16 = run.summary["modes"]
    assert (fp32["status"], bf16["status"]) == ("failed", "done")
    assert "IsADirectoryError" in fp32["reason"]
    assert "failed: IsADirectoryError" in run.stdout
    assert "Traceback" in (run.out / "fp32" / "error.txt").read_text()


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_an_interrupt_ends_everything_at_once_with_one_line(folder: Path) -> None:
    command = [*COMMAND, "--text", str(folder / "text"), "--out", str(folder / "stopped"), "--steps", "4000"]
    with subprocess.Popen(
        command,
        env={**_environment(folder), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    ) as process:
        metrics = folder / "stopped" / "fp32" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr.strip() == f"lightning-mp demo: stopped; what was measured so far is in {folder / 'stopped'}"
    assert json.loads(metrics.read_text().splitlines()[0])["step"] == 1
    _wait_until_gone(process.pid)


def _wait_until_gone(group: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("processes of the stopped run are still there")
