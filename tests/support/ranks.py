"""Processes on loopback that run the cases of a test module; one that hangs or kills them costs the others nothing."""

from __future__ import annotations

import faulthandler
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol
from unittest import mock

import torch.multiprocessing as mp
from torch.cuda import is_available

#: a case that takes longer hangs, unless an extension of DeepSpeed's is being built, by whichever process
SECONDS = 120.0
#: that took three minutes on two busy cores
BUILD_SECONDS = 600.0
#: how long the other ranks may take to fail as well, once one has
GRACE = 5.0
#: what the fork server imports once, in place of every process that it starts; DeepSpeed's engine compiles at import
PRELOADED = [
    "lightning_mp.deepspeed.strategy", "lightning_mp.fsdp2.strategy", "deepspeed.runtime.engine",
    "torch._inductor.compile_fx", "transformers.models.llama.modeling_llama", "pytest",
]  # fmt: skip


class Case(Protocol):
    """What every rank does: a frozen dataclass at the top of a module, its result picklable."""

    def run(self) -> Any: ...


@dataclass(frozen=True)
class Call:
    """A case that is a function at the top of a module, with its arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Any:
        return self.function(*self.arguments, **self.options)


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns that leaves its process in another state, as a distributed strategy does."""
    (found,) = run_ranks(Call(function, arguments), world=1)
    return found


def in_a_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a fork of this process, which has to have run no backward pass."""
    mine, theirs = mp.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        theirs.send_bytes(_answer(pickle.dumps(Call(function, arguments))))
        os._exit(0)
    theirs.close()
    fine, value = pickle.loads(mine.recv_bytes())
    os.waitpid(child, 0)
    if not fine:
        raise RankError(value)
    return value


class RankError(AssertionError):
    """A rank failed, died or hung; by rank, its traceback and what it printed last."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ranks:
    """``world`` processes as torchrun starts them, with gloo and a free port; they start with the first case.

    A result is kept, by the case's ``repr``: tests ask for a case as often as they like, and it runs once.
    """

    def __init__(
        self, world: int = 2, seconds: float = SECONDS, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.world, self.seconds, self._environment = world, seconds, dict(environment)
        self._children: list[Any] = []
        self._lines: list[Connection] = []
        self._started = 0.0
        self._logs = Path(tempfile.mkdtemp(prefix="ranks"))
        self._kept: dict[str, list[Any] | RankError] = {}

    def run(self, case: Case) -> list[Any]:
        """What ``case.run()`` returned, by rank.

        Raises:
            RankError: it failed on a rank, or did not end in time. All ranks were ended; the next case has new ones.
        """
        key = f"{type(case).__module__} {case!r}"
        if key not in self._kept:
            try:
                self._kept[key] = self._run(case)
            except RankError as error:
                self._kept[key] = error
        kept = self._kept[key]
        if isinstance(kept, RankError):
            raise kept
        return kept

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """What ``function`` returned, which stands at the top of a module, by rank."""
        return self.run(Call(function, arguments, options))

    def _run(self, case: Case) -> list[Any]:
        try:
            if not self._children:
                self._start()
            for line in self._lines:
                line.send_bytes(pickle.dumps(case))
            return self._collect(time.monotonic() + self.seconds)
        except BaseException:
            self.stop(kill=True)
            raise

    def _start(self) -> None:
        # Importing the hosts takes longer than most cases. The fork server does it once, and its processes begin with
        # that done; what has to be in the environment before an import takes a process that begins with nothing.
        # So does a GPU, which those imports touch.
        preloads = not self._environment and not is_available()
        context: Any = mp.get_context("forkserver" if preloads else "spawn")
        port, self._started = free_port(), time.time()
        if preloads:
            context.set_forkserver_preload(PRELOADED)
        with mock.patch.dict(os.environ, self._environment):
            for rank in range(self.world):
                mine, theirs = context.Pipe()
                arguments = (rank, self.world, port, str(self._log(rank)), theirs, dict(os.environ))
                self._children.append(context.Process(target=_serve, args=arguments, daemon=True))
                self._lines.append(mine)
                self._children[-1].start()
                theirs.close()

    def _collect(self, deadline: float) -> list[Any]:
        values: dict[int, Any] = {}
        failed: dict[int, str] = {}
        latest = deadline + BUILD_SECONDS
        while len(values) + len(failed) < self.world:
            waited_for = {line: rank for rank, line in enumerate(self._lines) if rank not in values | failed}
            ready: Any = wait(list(waited_for), max(0.0, deadline - time.monotonic()))
            if not ready and not failed and self._locks() and time.monotonic() < latest:
                deadline = time.monotonic() + self.seconds  # all of it again, with what is being built
                continue
            if not ready:
                failed |= {rank: self._stack(rank) for rank in waited_for.values()}
            for line in ready:
                rank = waited_for[line]
                try:
                    fine, value = pickle.loads(line.recv_bytes())
                except (EOFError, ConnectionError):
                    self._children[rank].join(GRACE)
                    fine, value = False, f"died, exit code {self._children[rank].exitcode}"
                (values if fine else failed)[rank] = value
            if failed:
                deadline = min(deadline, time.monotonic() + GRACE)
        if failed:
            raise RankError("\n".join(f"rank {rank}: {said}{self._printed(rank)}" for rank, said in failed.items()))
        return [values[rank] for rank in range(self.world)]

    def _locks(self, since: float = 0.0) -> list[Path]:
        """Of torch's extensions that are being built, and were begun ``since`` then."""
        found = list[Path]()
        for lock in Path(os.environ.get("TORCH_EXTENSIONS_DIR", "none")).glob("*/lock"):
            with suppress(FileNotFoundError):  # done meanwhile
                found += [lock] if lock.stat().st_mtime >= since else []
        return found

    def _stack(self, rank: int) -> str:
        """What a rank that does not answer is at; it writes that into its log."""
        with suppress(ProcessLookupError):
            os.kill(self._children[rank].pid, signal.SIGUSR1)
            time.sleep(0.5)
        return f"did not finish; a case may take {self.seconds:.0f} s, and {GRACE:.0f} s once another rank failed"

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank{rank}.log"

    def _printed(self, rank: int) -> str:
        log = self._log(rank)
        text = log.read_text(errors="replace")[-4000:].strip() if log.exists() else ""
        return f"\n--- printed by rank {rank}:\n{text}" if text else ""

    def stop(self, kill: bool = False) -> None:
        """End the processes that this object started, and what they started."""
        for line in self._lines:
            line.close()  # they end by themselves
        for child in self._children:
            child.join(0 if kill else 10)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.join(10)
        for lock in self._locks(self._started) if kill and self._children else ():
            lock.unlink(missing_ok=True)  # every later build would wait for the one that was ended
        self._children, self._lines = [], []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()
        shutil.rmtree(self._logs, ignore_errors=True)


def run_ranks(case: Case, world: int = 2, seconds: float = SECONDS) -> list[Any]:
    with Ranks(world, seconds) as ranks:
        return ranks.run(case)


def _serve(rank: int, world: int, port: int, log: str, line: Connection, environment: dict[str, str]) -> None:
    os.setsid()  # a group of its own, to be ended with all it starts
    with Path(log).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # nothing is lost when it is killed
    faulthandler.register(signal.SIGUSR1, sys.__stderr__)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.clear()  # the fork server's is as old as the server
    os.environ.update(environment | {name: str(value) for name, value in ranks.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test", OMP_NUM_THREADS="1")
    import torch

    with suppress(ImportError):
        import deepspeed.ops

        # its collectives of shared memory are for inference; to build them takes a minute
        deepspeed.ops.__compatible_ops__ = {}
    torch.set_num_threads(1)
    while True:
        try:
            case = line.recv_bytes()
        except (EOFError, ConnectionError):
            os._exit(0)  # without the destructors of process groups, which may wait for the other rank
        Path(log).write_bytes(b"")
        torch.manual_seed(0)  # whatever ran before
        line.send_bytes(_answer(case))


def _answer(case: bytes) -> bytes:
    try:
        return pickle.dumps((True, pickle.loads(case).run()))  # bytes: shared tensors would die with this process
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
