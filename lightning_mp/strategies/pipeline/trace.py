"""The schedule as it ran: when each stage worked on which micro-batch, in the second step."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_mp.monitor.run_folder import PIPELINE

#: the first step also finds out shapes
STEP = 1


@dataclass(frozen=True, slots=True)
class Work:
    """A stage's work on one micro-batch: ``kind`` is forward, backward or weights; seconds since the step began."""

    rank: int
    stage: int
    kind: str
    microbatch: int
    begin: float
    end: float


class Trace:
    """Collects the work of this rank's stages while a step runs that is ``watched``."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device, self._on = group, device, False
        self._start: Any = None
        self._marks: list[tuple[int, str, int, Any, Any]] = []

    @contextmanager
    def watched(self) -> Generator[None, None, None]:
        """All ranks begin together, so that their clocks agree; once a run."""
        dist.barrier(group=self._group)
        self._start, self._on = self._shared_start(), True
        yield
        self._on = False

    def _shared_start(self) -> Any:
        """The processes of one machine share its clock: no rank's late return from the barrier shifts its times."""
        start = self._mark()
        if self._device.type == "cuda":
            return start
        first: list[Any] = [(platform.node(), start)]
        dist.broadcast_object_list(first, group=self._group, group_src=0)
        machine, begun = first[0]
        return begun if machine == platform.node() else start

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def work(self, stage: int, kind: str, microbatch: int) -> Generator[None, None, None]:
        """Around a stage's work on a micro-batch."""
        if not self._on:
            yield
            return
        begin = self._mark()
        yield
        self._marks.append((stage, kind, microbatch, begin, self._mark()))

    def _seconds(self, mark: Any) -> float:
        if self._device.type != "cuda":
            return mark - self._start
        return self._start.elapsed_time(mark) / 1000

    def gathered(self) -> list[Work]:
        """What all ranks of the pipeline did; every one of them calls it, after the step."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        rank = dist.get_rank(self._group)
        own = [Work(rank, s, kind, m, self._seconds(a), self._seconds(b)) for s, kind, m, a, b in self._marks]
        every: list[Any] = [None] * self._group.size()
        dist.all_gather_object(every, own, group=self._group)
        return [work for each in every for work in each]


def write(works: list[Work], folder: str | Path) -> None:
    """``pipeline.json``, a line a piece of work."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    (place / PIPELINE).write_text("".join(json.dumps(asdict(work)) + "\n" for work in works))
