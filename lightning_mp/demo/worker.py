"""A fresh process for every mode, so that none inherits another's memory, thread pools or global settings."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning_mp.demo.records import Failure, Job, Reading, Result

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from lightning_mp.demo.tokens import Corpus


class Processes:
    """Starts a process a mode, one after the other.

    On a CPU they are forked from a server that has imported torch, Lightning and transformers and done nothing else
    with them, which saves those seconds for every mode but the first. Where there is no fork, and with CUDA, which
    does not survive one, each process starts from nothing.
    """

    def __init__(self) -> None:
        self._forks = "forkserver" in multiprocessing.get_all_start_methods()
        if self._forks:
            from multiprocessing import forkserver

            # Started here, the server imports while the text is being read and tokenized.
            forkserver.set_forkserver_preload(["lightning_mp.demo.training"])
            with _interrupts_ignored():
                forkserver.ensure_running()

    def train(self, job: Job, corpus: Corpus, report: Callable[[Reading], None]) -> Result | Failure:
        """Run a mode to its end. An interrupt of this process ends the other at once and is passed on."""
        context: Any = multiprocessing.get_context("forkserver" if self._forks and job.device == "cpu" else "spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(job, corpus, sender), daemon=True)
        with _interrupts_ignored():
            process.start()
        sender.close()
        try:
            return _listen(receiver, report) or _ended(process)
        finally:
            receiver.close()
            process.kill()
            process.join()


def _listen(receiver: Connection, report: Callable[[Reading], None]) -> Result | Failure | None:
    """Pass readings on until the outcome comes; ``None`` where the process ended without one."""
    while True:
        try:
            message = receiver.recv()
        except EOFError:
            return None
        if isinstance(message, Reading):
            report(message)
        else:
            return message


def _ended(process: Any) -> Failure:
    process.join()
    code = process.exitcode
    reason = f"its process ended with exit status {code}"
    if code == -9:
        reason += ", killed, most likely for want of memory"
    return Failure(reason, reason)


def _run(job: Job, corpus: Corpus, sender: Connection) -> None:
    """The other process's side."""
    # Ctrl-C reaches every process of the terminal; the parent decides, and kills this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        from lightning_mp.demo.training import train_mode

        outcome: Result | Failure = train_mode(job, corpus, sender.send)
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        outcome = Failure(f"{type(error).__name__}: {first}", traceback.format_exc())
    try:
        sender.send(outcome)
    except BrokenPipeError:
        return


@contextmanager
def _interrupts_ignored() -> Generator[None]:
    """A process started here ignores Ctrl-C from its very first moment, before it can say so itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
