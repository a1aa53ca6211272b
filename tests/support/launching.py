"""Starts a user's script as torchrun or Lightning would, and ends all of it that a test leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.ranks import free_port

SCRIPT = Path(__file__).parent / "scripts" / "train.py"
#: what tells a process that it was launched; none of it may come from the test's own surroundings
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR")
_LAUNCHED += ("MASTER_PORT", "PYTEST_CURRENT_TEST", "PL_GLOBAL_SEED")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a launch ended: the exit code, all that was printed in the order it was, when, and what was left running."""

    code: int
    output: str
    at: float
    left: bool


def environment(**extra: Any) -> dict[str, str]:
    """The surroundings of a process that nobody launched, with ``extra``."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHED and not name.startswith(("SLURM_", "TORCHELASTIC_"))
    }
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **{k: str(v) for k, v in extra.items()}}


def script(**options: Any) -> list[str]:
    given = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items()]
    return [str(SCRIPT), *(word for pair in given for word in pair)]


def torchrun(*how: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *how]


def on_loopback() -> tuple[str, ...]:
    return ("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")


def run(command: list[str], log: Path, timeout: float = 240) -> Ended:
    """Run a command that prints into ``log``; after ``timeout`` what is left is killed.

    The first one under ZeRO compiles DeepSpeed's collective, a minute of a free CPU.
    """
    child = None
    try:
        with log.open("ab") as file:  # appended to, so that what several print comes in the order it was printed
            child = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment(),
                cwd=log.parent,
                start_new_session=True,
            )
        code, left, at = child.wait(timeout), _runs(child), time.time()
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"not over after {timeout} s:\n{log.read_text(errors='replace')[-6000:]}") from None
    finally:
        if child is not None:  # its session's group has its number, also when it is gone itself
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return Ended(code, log.read_text(errors="replace"), at, left)


def _runs(child: subprocess.Popen[bytes]) -> bool:
    """Whether anything that the child started outlives it by more than it takes to end by itself."""
    deadline = time.monotonic() + 10
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(child.pid, 0)
            time.sleep(0.2)
        return True
    return False


def seen(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
