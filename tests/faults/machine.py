"""What the machine did meanwhile: a slow stretch in which the process had no core is no fault of the run, and no false
alert.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_mp.monitor.alerts import AlertSettings
from lightning_mp.monitor.events import Event

#: of a core: a run that computes all the time has one, and at half of it takes twice as long
ENOUGH = 0.5


class Share(Callback):
    """How much of a core the process had, by step."""

    def __init__(self) -> None:
        self.shares: dict[int, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self.shares[trainer.global_step - 1] = (cpu - self._cpu) / (wall - self._wall)
        self._wall, self._cpu = wall, cpu


def excused(event: Event, shares: dict[int, float]) -> bool:
    """Whether it tells of a slow stretch in which another process had the core."""
    last = range(event.step - AlertSettings().throughput_patience + 1, event.step + 1)
    return event.kind == "throughput_drop" and all(shares.get(step, 1.0) < ENOUGH for step in last)


def unexcused(events: Iterable[Event], shares: dict[int, float], began: int) -> list[Event]:
    """The events without those that the machine is to blame for, before the fault ``began``."""
    return [event for event in events if event.step >= began or not excused(event, shares)]
