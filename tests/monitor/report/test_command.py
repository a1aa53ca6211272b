"""``lightning-mp report``: one file, or one page that follows the run; one line where it cannot."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lightning_mp.cli import app
from lightning_mp.monitor.report.serve import ReportServer
from monitor.report.runs import reading, write_run


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def _refusal(*arguments: str | Path) -> str:
    result = _run(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("lightning-mp report: ")
    return line


@contextmanager
def _served(folder: Path) -> Generator[ReportServer]:
    with ReportServer([folder], 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def _get(url: str, host: str | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_it_says_where_the_file_is(tmp_path: Path) -> None:
    result = _run(write_run(tmp_path / "run"))
    assert (result.exit_code, result.output) == (0, f"{tmp_path / 'run' / 'report.html'}\n")
    result = _run(tmp_path / "run", write_run(tmp_path / "other"), "--output", tmp_path / "both.html")
    assert (result.exit_code, result.output) == (0, f"{tmp_path / 'both.html'}\n")


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    assert "which holds no run" in _refusal(tmp_path)
    assert "which does not exist" in _refusal(tmp_path / "gone")
    run = write_run(tmp_path / "run")
    assert "Name the runs in it" in _refusal(tmp_path)
    assert str(tmp_path / "no" / "x.html") in _refusal(run, "--output", tmp_path / "no" / "x.html")
    assert "--serve and --output" in _refusal(run, "--serve", "--output", tmp_path / "x.html")


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = _refusal(write_run(tmp_path), "--serve", "--port", port)
    assert f"port {port}: " in line
    assert "--port 0" in line


def test_a_served_page_and_its_news(tmp_path: Path) -> None:
    with _served(write_run(tmp_path)) as server:
        status, page = _get(server.url)
        assert status == 200
        assert b"data-live" in page
        assert b"connect-src 'self'" in page
        status, news = _get(f"{server.url}data.json?seen=")
        content = json.loads(news)
        assert status == 200
        assert content["steps"] == [1, 30]
        assert _get(f"{server.url}data.json?seen={content['version']}") == (204, b"")
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 31, **reading(31)}) + "\n")
        status, news = _get(f"{server.url}data.json?seen={content['version']}")
        assert status == 200
        assert json.loads(news)["steps"] == [1, 31]
        assert not (tmp_path / "report.html").exists()


def test_a_served_run_may_lose_its_files(tmp_path: Path) -> None:
    with _served(write_run(tmp_path)) as server:
        for path in tmp_path.iterdir():
            path.unlink()
        status, news = _get(f"{server.url}data.json")
        assert status == 200
        assert "metrics.jsonl is missing" in json.loads(news)["page"]


def test_only_this_machine_is_served_and_only_the_report(tmp_path: Path) -> None:
    with _served(write_run(tmp_path)) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert _get(server.url, host=f"localhost:{server.server_port}")[0] == 200
        assert _get(server.url, host="example.org")[0] == 403
        for path in ("metrics.jsonl", "../run.json", "report.html"):
            assert _get(server.url + path)[0] == 404


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_an_interrupt_ends_the_serving_without_a_word(tmp_path: Path) -> None:
    # A shell that ignores SIGINT, as for a job in the background, hands that on to what it starts.
    interruptible = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{interruptible}; from lightning_mp.cli import main; main()"
    command = [sys.executable, "-c", code, "report", str(write_run(tmp_path)), "--serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=30)
    assert (process.returncode, rest, errors) == (0, "", "")
