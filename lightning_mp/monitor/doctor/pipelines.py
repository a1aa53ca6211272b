"""Pipeline stages that wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_mp.monitor.doctor.case import Case
from lightning_mp.monitor.findings import Finding
from lightning_mp.planner.speed import bubble

#: of a step; with four micro-batches a stage, as many as there are unless told otherwise, it is less
_MOST = 0.2


def waits(case: Case) -> Iterator[Finding]:
    """A schedule of so few micro-batches that its ranks are idle for much of a step."""
    layout_on: Any = getattr(case.strategy, "layout_on", None)
    devices, nodes = case.argument("devices", "auto"), case.argument("num_nodes", 1)
    if layout_on is None or not isinstance(devices, int) or devices < 1:
        return
    layout = layout_on(devices * nodes)
    share = bubble(layout.stages, layout.microbatches, layout.per_rank)
    if share > _MOST:
        enough = 4 * layout.stages
        yield Finding(
            name="pipeline_bubble",
            severity="info",
            what=f"microbatches={layout.microbatches} in {layout.stages} stages: ranks wait for {share:.0%} of a step",
            why="the first micro-batch has to reach the last stage, and the last one the first, while others have none",
            fix=f"use microbatches={enough}, of fewer rows or in a larger batch: "
            f"{bubble(layout.stages, enough, layout.per_rank):.0%}",
            where="microbatches",
        )
