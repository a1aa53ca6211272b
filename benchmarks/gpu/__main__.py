"""``python -m benchmarks.gpu --out DIR [--quick]``: run every part, and write what came of it as JSON and as a page."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu import page

ROOT = Path(__file__).resolve().parents[2]
#: the parts in order of importance, and the seconds each may take: nine minutes in all
PARTS = {"tests": 150, "sync": 40, "ladder": 75, "overhead": 80, "mfu": 80, "fp8": 115}
#: what a part's log may hold in the page and the JSON
TAIL = 1500
_PACKAGES = ("torch", "lightning", "transformers", "peft", "omegaconf", "hydra-core", "deepspeed", "torchao")


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 where every part ran to its end and, of the tests, none failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder for results.json, gpu.md and the logs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--quick", action="store_true", help="tiny models, also on a CPU: the figures mean nothing")
    options = parser.parse_args(arguments)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"machine": _machine(), "quick": options.quick, "parts": {}}
    for name in options.parts:
        print(f"{name}: up to {PARTS[name]} s", flush=True)
        part = results["parts"][name] = _run(name, out, quick=options.quick)
        print(f"{name}: {'ok' if part['ok'] else part['error'].strip().splitlines()[-1]}, {part['seconds']:.0f} s")
        # after every part: what ends this process early costs the parts that are still to come, nothing else
        (out / "results.json").write_text(json.dumps(results, indent=1))
        (out / "gpu.md").write_text(page.markdown(results))
    return 0 if all(part["ok"] for part in results["parts"].values()) else 1


def _run(name: str, out: Path, *, quick: bool) -> dict[str, Any]:
    written, log, start = out / f"{name}.json", out / f"{name}.log", time.monotonic()
    written.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.part", name, str(written), *["--quick"] * quick]
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    error = ""
    with log.open("w") as file:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = child.wait(PARTS[name])
            error = "" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # the part's own process group, and what it started
            child.wait()
            error = f"not done after {PARTS[name]} s"
    if error:
        error = f"{log.read_text(errors='replace')[-TAIL:]}\n{error}"
    # a part writes what it has after every figure, so that one that was ended has said something too
    figures = json.loads(written.read_text()) if written.exists() else {}
    return {"ok": not error, "error": error, "seconds": time.monotonic() - start, "figures": figures}


def _machine() -> dict[str, Any]:
    about: dict[str, Any] = {"date": datetime.now(timezone.utc).strftime("%Y-%m-%d"), "python": sys.version.split()[0]}
    about |= {package: _version(package) for package in _PACKAGES}
    try:
        import torch

        about["torch"] = torch.__version__  # with the CUDA version it was built for
        about["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    except Exception as error:
        about["device"] = f"torch cannot be imported: {error}"
    return about


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
