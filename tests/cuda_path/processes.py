"""Cases on the machine of nothing, each in a process of its own: forks of one that imported everything and ran nothing.

A process that has run a backward pass must not be forked: autograd's threads would be missing. TF32's switches once
written do not read as never written. So no case runs in the process that is forked, and none after another.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Protocol

from cuda_path.machine import MACHINE, Machine

#: how long a case may take, on a busy machine too, and what is imported before the first
SECONDS = 240.0
PRELOADED = ("lightning_mp.callbacks", "lightning_mp.planner", "lightning_mp.planner.predict", "cuda_path.fits")
ROOT = Path(__file__).parents[2]


class Case(Protocol):
    """What a process does: a frozen dataclass at the top of a module, its result picklable."""

    def run(self) -> Any: ...


class CaseError(AssertionError):
    """A case failed, died or hung; with its traceback and what it printed last."""


class Processes:
    """The process that is forked for each case; it starts with the first one."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._log = Path(tempfile.mkdtemp(prefix="cuda_path")) / "log"

    def run(self, case: Case, machine: Machine | None = None) -> Any:
        """What ``case.run()`` returned, on ``machine``.

        Raises:
            CaseError: as it says.
        """
        if self._child is None:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
            environment |= {"OMP_NUM_THREADS": "1", "CUDA_PATH_LOG": str(self._log)}
            environment.pop("PL_GLOBAL_SEED", None)  # a test before may have left it: Lightning seeds by it
            command = [sys.executable, "-m", "cuda_path.processes"]
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
            )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        _send(self._child.stdin, pickle.dumps((asdict(machine or Machine()), case)))
        answer = _receive(self._child.stdout, time.monotonic() + SECONDS)
        if answer is None:
            self.stop()
            raise CaseError(f"{case} did not answer within {SECONDS:.0f} s, or its process died\n{self._printed()}")
        fine, value = pickle.loads(answer)
        if not fine:
            raise CaseError(f"{case}\n{value}\n{self._printed()}")
        return value

    def _printed(self) -> str:
        return self._log.read_text(errors="replace")[-4000:] if self._log.exists() else ""

    def stop(self) -> None:
        """End the processes that this object started."""
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.communicate()
            self._child = None


def _send(line: IO[bytes], content: bytes) -> None:
    line.write(struct.pack("!Q", len(content)) + content)
    line.flush()


def _receive(line: IO[bytes], deadline: float) -> bytes | None:
    """What was sent; ``None`` where it does not come in time, or not whole."""
    found, size = b"", 8
    while len(found) < size:
        ready, _, _ = select.select([line], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(line.fileno(), size - len(found)) if ready else b""
        if not part:
            return None
        found += part
        if size == 8 and len(found) == 8:
            size += struct.unpack("!Q", found)[0]
    return found[8:]


# ------------------------------------------------------------------ in the process that is forked


def _answer(machine: Mapping[str, Any], case: Case) -> bytes:
    MACHINE.become(machine)
    try:
        return pickle.dumps((True, case.run()))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _serve() -> None:
    from importlib import import_module

    from cuda_path import machine

    machine.load()
    machine.install()
    for name in PRELOADED:
        import_module(name)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    while size := requests.read(8):
        content = requests.read(struct.unpack("!Q", size)[0])
        log = os.open(os.environ["CUDA_PATH_LOG"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        child = os.fork()
        if not child:
            _send(answers, _answer(*pickle.loads(content)))
            sys.stdout.flush()
            os._exit(0)  # without the destructors of process groups
        _, status = os.waitpid(child, 0)
        if status:
            _send(answers, pickle.dumps((False, f"died, exit code {os.waitstatus_to_exitcode(status)}")))


if __name__ == "__main__":
    _serve()
