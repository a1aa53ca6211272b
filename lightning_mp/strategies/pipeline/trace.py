"""The schedule as it ran: when each stage worked on which micro-batch, in the second step; a table and a picture."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_mp.monitor.run_folder import PIPELINE, PIPELINE_PICTURE

#: the first step also finds out shapes
STEP = 1
_COLORS = {"forward": "#4c78a8", "backward": "#f58518", "weights": "#54a24b"}
_HEIGHT, _WIDTH, _LEFT = 28, 900, 80
_FONT = 'font-family="sans-serif" font-size="13"'


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


def in_flight(works: Iterable[Work]) -> dict[int, int]:
    """By rank, how many micro-batches it held activations of at most: forward begun, backward not ended."""
    held: dict[int, int] = {}
    most: dict[int, int] = {}
    changes = [(w.rank, w.begin, 1) for w in works if w.kind == "forward"]
    changes += [(w.rank, w.end, -1) for w in works if w.kind == "backward"]
    for rank, _, change in sorted(changes, key=lambda each: each[1]):
        held[rank] = held.get(rank, 0) + change
        most[rank] = max(most.get(rank, 0), held[rank])
    return most


def write(works: list[Work], folder: str | Path) -> None:
    """``pipeline.json``, a line a piece of work, and ``pipeline.svg``."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    (place / PIPELINE).write_text("".join(json.dumps(asdict(work)) + "\n" for work in works))
    (place / PIPELINE_PICTURE).write_text(picture(works))


def picture(works: list[Work]) -> str:
    """An SVG: a row a rank, time to the right, each box a micro-batch in a stage."""
    first, last = min(work.begin for work in works), max(work.end for work in works)
    scale = (_WIDTH - _LEFT - 10) / max(last - first, 1e-9)
    ranks = sorted({work.rank for work in works})
    boxes = [f'<text x="4" y="{_HEIGHT * row + 19}">rank {rank}</text>' for row, rank in enumerate(ranks)]
    for work in works:
        left, row = _LEFT + (work.begin - first) * scale, ranks.index(work.rank)
        width = max((work.end - work.begin) * scale, 1)
        told = escape(f"stage {work.stage}, micro-batch {work.microbatch}, {work.kind}: {work.end - work.begin:.2g} s")
        boxes.append(
            f'<rect x="{left:.1f}" y="{_HEIGHT * row + 4}" width="{width:.1f}" height="{_HEIGHT - 8}" '
            f'fill="{_COLORS[work.kind]}" stroke="white"><title>{told}</title></rect>'
        )
        if width > 12:
            boxes.append(f'<text x="{left + 3:.1f}" y="{_HEIGHT * row + 19}" fill="white">{work.microbatch}</text>')
    legend = " ".join(
        f'<text x="{_LEFT + 110 * place}" y="{_HEIGHT * len(ranks) + 18}" fill="{color}">{kind}</text>'
        for place, (kind, color) in enumerate(_COLORS.items())
        if any(work.kind == kind for work in works)
    )
    boxes.append(f'<text x="{_WIDTH - 150}" y="{_HEIGHT * len(ranks) + 18}">{(last - first) * 1000:.1f} ms</text>')
    height = _HEIGHT * (len(ranks) + 1)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" {_FONT}>'
    return "\n".join([head, *boxes, legend, "</svg>"]) + "\n"
