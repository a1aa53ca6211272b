"""Numbers of a device on their way to the host, for which nothing waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_mp.monitor.health.scale_sources import Number

Read = dict[str, float | None]
#: rows of the tables that were sent along
Tables = list[list[list[float]]]
#: how many steps later numbers are looked at, at most
LAG = 3


@dataclass(slots=True)
class Sent:
    """Values of which some are still on their way."""

    values: Read
    names: list[str]
    shapes: list[torch.Size]
    host: tuple[Tensor, Any]
    event: Any
    then: Callable[[Read, Tables], object]
    age: int = 0

    def read(self) -> tuple[Read, Tables]:
        """All values and tables; waits for those that have not arrived."""
        if self.event is not None:
            self.event.synchronize()
        size = len(self.names) + sum(map(torch.Size.numel, self.shapes))
        numbers: list[float] = self.host[1][:size].tolist()
        self.values.update(zip(self.names, numbers, strict=False))
        start, tables = len(self.names), Tables()
        for rows, width in self.shapes:
            tables.append([numbers[start + row * width : start + (row + 1) * width] for row in range(rows)])
            start += rows * width
        return self.values, tables


class ToHost:
    """Copies what is on ``device`` into pinned memory, and hands it on in order once it is there.

    On CUDA that is at most ``lag`` steps later, on ``ranks`` of more than one always so many, for all have to do the
    same; on any other device it is at once.
    """

    def __init__(self, device: torch.device, ranks: int = 1, lag: int = LAG) -> None:
        self._device, self._ranks, self._lag = device, ranks, lag
        self._under_way: deque[Sent] = deque()
        self._free: list[tuple[Tensor, Any]] = []

    def send(
        self, values: Mapping[str, Number | None], *tables: Tensor, then: Callable[[Read, Tables], object]
    ) -> None:
        """Copy ``values`` and 2-D ``tables``; :meth:`deliver` will call ``then`` with them."""
        self._under_way.append(self._start(values, tables, then))

    def deliver(self, *, wait: bool = False) -> None:
        """After every step: hand on what has arrived, or with ``wait`` everything."""
        for sent in self._under_way:
            sent.age += 1
        while self._under_way and (wait or self._is_due(self._under_way[0])):
            sent = self._under_way.popleft()
            values, tables = sent.read()
            self._free.append(sent.host)
            sent.then(values, tables)

    def read(self, values: Mapping[str, Number | None]) -> Read:
        """``values`` at once: the one wait there is."""
        sent = self._start(values, (), lambda *_: None)
        read, _ = sent.read()
        self._free.append(sent.host)
        return read

    def _is_due(self, sent: Sent) -> bool:
        return sent.event is None or sent.age > self._lag or (self._ranks == 1 and bool(sent.event.query()))

    def _start(
        self, values: Mapping[str, Number | None], tables: tuple[Tensor, ...], then: Callable[[Read, Tables], object]
    ) -> Sent:
        kind = self._device.type
        there = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.device.type == kind}
        known = {n: v if v is None or n in there else float(v) for n, v in values.items()}
        columns = [value.detach().reshape(1).to(torch.float32) for value in there.values()]
        flat = torch.cat([*columns, *(table.reshape(-1) for table in tables)]) if columns or tables else None
        host = self._buffer(0 if flat is None else flat.numel())
        event = None
        if flat is not None:
            host[0][: flat.numel()].copy_(flat, non_blocking=True)
            if self._device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(self._device))
        return Sent(known, list(there), [table.shape for table in tables], host, event, then)  # pyright: ignore

    def _buffer(self, size: int) -> tuple[Tensor, Any]:
        """Pinned memory, and its view by numpy: one of those that are free, if it is large enough."""
        for place, (tensor, _) in enumerate(self._free):
            if tensor.numel() >= size:
                return self._free.pop(place)
        tensor = torch.empty(max(size, 64), dtype=torch.float32, pin_memory=self._device.type == "cuda")
        return tensor, tensor.numpy()
