"""Starts a user's script as torchrun, SLURM or Lightning would, and ends all of it that a test leaves behind."""

from __future__ import annotations

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
    """How a launch ended: the exit codes, all that was printed in the order it was, when, and what was left running."""

    codes: tuple[int, ...]
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
    """The script and its arguments."""
    given = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items()]
    return [str(SCRIPT), *(word for pair in given for word in pair)]


def torchrun(*how: str) -> list[str]:
    """torchrun with its options, up to the script."""
    return [sys.executable, "-m", "torch.distributed.run", *how]


def on_loopback() -> tuple[str, ...]:
    """torchrun's options for two processes here, meeting at a port of their own."""
    return ("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")


def as_node(rank: int, port: int) -> tuple[str, ...]:
    """torchrun's options for one of two nodes with a process each."""
    meeting = ("--master-addr", "127.0.0.1", "--master-port", str(port))
    return ("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(rank), *meeting)


def slurm_task(rank: int, port: int) -> dict[str, str]:
    """What srun sets for one of two tasks on one node."""
    return environment(
        SLURM_JOB_ID=1234,
        SLURM_JOB_NAME="train",
        SLURM_NTASKS=2,
        SLURM_NTASKS_PER_NODE=2,
        SLURM_NNODES=1,
        SLURM_NODELIST="127.0.0.1",
        SLURM_NODEID=0,
        SLURM_PROCID=rank,
        SLURM_LOCALID=rank,
        MASTER_PORT=port,  # else made of the job's number, which may be taken
    )


def run(
    commands: list[list[str]], log: Path, environments: list[dict[str, str]] | None = None, timeout: float = 90
) -> Ended:
    """Run the commands side by side, all printing into ``log``; after ``timeout`` what is left is killed."""
    started, children = time.monotonic(), []
    try:
        with log.open("ab") as file:  # appended to, so that what several print comes in the order it was printed
            for command, surroundings in zip(commands, environments or [environment()] * len(commands), strict=True):
                children.append(
                    subprocess.Popen(
                        command,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                        env=surroundings,
                        cwd=log.parent,
                        start_new_session=True,
                    )
                )
        codes = tuple(child.wait(max(0.1, started + timeout - time.monotonic())) for child in children)
        left = any(_runs(child) for child in children)
        ended = time.time()
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"not over after {timeout} s:\n{log.read_text(errors='replace')[-6000:]}") from None
    finally:
        for child in children:
            _kill(child)
    return Ended(codes, log.read_text(errors="replace"), ended, left)


def _runs(child: subprocess.Popen[bytes]) -> bool:
    """Whether anything that the child started outlives it by more than it takes to end by itself."""
    deadline = time.monotonic() + 10
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(child.pid, 0)
            time.sleep(0.2)
        return True
    return False


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a child and all it started: its session's group has its number, also when it is gone itself."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def seen(folder: Path) -> list[dict[str, Any]]:
    """What the ranks wrote about their runs, by rank."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
