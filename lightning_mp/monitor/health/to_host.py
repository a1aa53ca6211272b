"""Numbers of a device on their way to the host, for which nothing waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_mp.monitor.health.scale_sources import Number

Read = dict[str, Any]
#: how many steps later numbers are looked at, at most
LAG = 3


@dataclass(slots=True)
class Sent:
    """Values of which some are still on their way into ``host``: pinned memory, and its view by numpy."""

    values: Read
    shapes: dict[str, torch.Size]
    host: tuple[Tensor, Any]
    event: Any
    then: Callable[[Read], object]
    age: int = 0


class ToHost:
    """Copies what is on ``device`` into pinned memory, and hands it on in order once it is there.

    On CUDA that is at most ``lag`` steps later, on ``ranks`` of more than one always so many, for all have to do the
    same; on any other device it is at once.
    """

    def __init__(self, device: torch.device, ranks: int = 1, lag: int = LAG) -> None:
        self._device, self._ranks, self._lag = device, ranks, lag
        self._under_way: deque[Sent] = deque()
        self._free: list[tuple[Tensor, Any]] = []

    def send(self, values: Mapping[str, Number | None], then: Callable[[Read], object]) -> None:
        """Copy ``values``; :meth:`deliver` will call ``then`` with them, a table as lists."""
        self._under_way.append(self._start(values, then))

    def deliver(self, *, wait: bool = False) -> None:
        """After every step: hand on what has arrived, or with ``wait`` everything."""
        for sent in self._under_way:
            sent.age += 1
        while self._under_way:
            sent = self._under_way[0]
            if not (wait or sent.event is None or sent.age > self._lag or (self._ranks == 1 and sent.event.query())):
                break
            self._under_way.popleft()
            sent.then(self._arrived(sent))

    def read(self, values: Mapping[str, Number | None]) -> Read:
        """``values`` at once: the one wait there is."""
        return self._arrived(self._start(values, lambda _: None))

    def _arrived(self, sent: Sent) -> Read:
        if sent.event is not None:
            sent.event.synchronize()
        start, (_, numbers) = 0, sent.host
        for name, shape in sent.shapes.items():
            sent.values[name] = numbers[start : start + shape.numel()].reshape(shape).tolist()
            start += shape.numel()
        self._free.append(sent.host)
        return sent.values

    def _start(self, values: Mapping[str, Number | None], then: Callable[[Read], object]) -> Sent:
        kind = self._device.type
        there = {n: v.detach() for n, v in values.items() if isinstance(v, Tensor) and v.device.type == kind}
        known = {n: v if v is None or n in there else float(v) for n, v in values.items()}
        columns = [value.reshape(-1).to(torch.float32) for value in there.values()]
        host = self._buffer(sum(map(len, columns)))
        event = None
        if columns:
            flat = torch.cat(columns)
            host[0][: len(flat)].copy_(flat, non_blocking=True)
            if kind == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(self._device))
        return Sent(known, {name: value.shape for name, value in there.items()}, host, event, then)

    def _buffer(self, size: int) -> tuple[Tensor, Any]:
        """One of those that are free, if it is large enough."""
        for place, (tensor, _) in enumerate(self._free):
            if len(tensor) >= size:
                return self._free.pop(place)
        tensor = torch.empty(max(size, 64), dtype=torch.float32, pin_memory=self._device.type == "cuda")
        return tensor, tensor.numpy()
