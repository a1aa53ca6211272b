"""Processes that live through all cells of a strategy; a cell that hangs or kills them costs the others nothing."""

from __future__ import annotations

import os
import pickle
import queue
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch.multiprocessing as mp

from conformance import HOST
from lightning_mp.compat.host import COPIES
from support.gloo import free_port

#: a cell that takes longer hangs; the first one may have to wait for an extension to be built
CELL_SECONDS = 150.0


class PoolError(RuntimeError):
    """The processes died or hung in a cell."""


def _quietly(log: str) -> None:
    """What other packages print goes to a file, whatever they print with."""
    import logging
    import warnings

    with Path(log).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    warnings.filterwarnings("ignore")
    for name in COPIES:
        logging.getLogger(name).setLevel(logging.ERROR)


def _serve(rank: int, world: int, port: int, log: str, tasks: Any, results: Any) -> None:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="conformance")
    os.environ["OMP_NUM_THREADS"] = "1"
    _quietly(log)
    import torch

    from conformance.strategies import TIMEOUT

    torch.set_num_threads(1)
    if world > 1:  # every strategy then uses this group, with its timeout
        torch.distributed.init_process_group("gloo", timeout=TIMEOUT)
    while True:
        task = tasks.get()
        if task is None:
            os._exit(0)  # without the destructors of process groups, which may wait for the other rank
        function, args = task
        try:
            value: Any = function(*args)
        except BaseException:
            value = RuntimeError(traceback.format_exc())
        results.put((rank, pickle.dumps(value)))  # bytes: shared tensors would die with this process


class Pool:
    """``world`` processes under the copy ``host`` of Lightning; ``call`` runs a function on all of them.

    They are started when first needed.
    """

    def __init__(self, world: int, folder: Path, host: str) -> None:
        self.world, self.folder, self.host = world, folder, host
        self._children: list[Any] = []
        self._tasks: list[Any] = []
        self._results: Any = None

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function`` returned, by rank.

        Raises:
            PoolError: a process died or did not answer; all of them were ended, the next call starts new ones.
        """
        if not self._children:
            self._start()
        for tasks in self._tasks:
            tasks.put((function, args))
        try:
            return self._collect(time.monotonic() + CELL_SECONDS)
        except PoolError:
            self.stop(kill=True)
            raise

    def _start(self) -> None:
        context, port = mp.get_context("spawn"), free_port()
        self._results, self._tasks = context.Queue(), [context.Queue() for _ in range(self.world)]
        for rank in range(self.world):
            log = str(self.folder / f"rank{rank}.log")
            args = (rank, self.world, port, log, self._tasks[rank], self._results)
            self._children.append(context.Process(target=_serve, args=args, daemon=True))
            with mock.patch.dict(os.environ, {HOST: self.host}):  # it imports this package before it is asked anything
                self._children[-1].start()

    def _collect(self, deadline: float) -> list[Any]:
        values: dict[int, Any] = {}
        while len(values) < self.world:
            try:
                rank, value = self._results.get(timeout=1.0)
                values[rank] = pickle.loads(value)
                continue
            except queue.Empty:
                pass
            missing = sorted(set(range(self.world)) - set(values))
            dead = {rank: self._children[rank].exitcode for rank in missing if not self._children[rank].is_alive()}
            if dead:
                raise PoolError(f"rank {min(dead)} died, exit code {dead[min(dead)]}\n{self._log(min(dead))}")
            if time.monotonic() > deadline:
                raise PoolError(f"ranks {missing} did not finish in {CELL_SECONDS:.0f} s\n{self._log(missing[0])}")
        return [values[rank] for rank in range(self.world)]

    def _log(self, rank: int) -> str:
        path = self.folder / f"rank{rank}.log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def stop(self, kill: bool = False) -> None:
        """End the processes this pool started."""
        for tasks, child in zip(self._tasks, self._children, strict=True):
            if not kill and child.is_alive():
                tasks.put(None)
        for child in self._children:
            if not kill:
                child.join(10)
            if child.is_alive():
                child.kill()
                child.join(10)
        self._children, self._tasks = [], []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()
