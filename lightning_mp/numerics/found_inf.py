"""``found_inf``, the flag of a step whose gradients are not finite: the one place where it is kept."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer


class FoundInf:
    """A flag for each optimizer: 1 where its gradients are not finite on some rank, else 0.

    Flags are fp32 scalars on the gradients' device. The host reads that of the last step when asked, and once.
    """

    def __init__(self) -> None:
        #: of the gradients that each optimizer steps with next
        self._flags: dict[int, Tensor] = {}
        #: of every step since the loss scale was adjusted last
        self._group: dict[int, Tensor] = {}
        self._sync: Callable[[Tensor], None] | None = None
        self._last: Tensor | None = None
        self._last_read: bool | None = False
        #: a step that was decided here is under way; any other is made by somebody else
        self.under_way = False

    def sync_with(self, sync: Callable[[Tensor], None] | None) -> None:
        """Reduce flags with ``sync`` (in place, maximum over ranks) from now on."""
        self._sync = sync

    def reduce_(self, flag: Tensor) -> None:
        """Replace ``flag`` by its maximum over ranks."""
        if self._sync is not None:
            self._sync(flag)

    # ------------------------------------------------------------------ gradients that wait for a step

    def of(self, optimizer: Optimizer, device: torch.device) -> Tensor:
        """The flag of the optimizer's gradients; a new one is 0, on ``device``."""
        key = id(optimizer)
        if key not in self._flags:
            self._flags[key] = self._zero(device)
        return self._flags[key]

    def drop(self, key: int) -> None:
        """Forget the flag of the optimizer whose ``id`` is ``key``: its next gradients begin at 0."""
        self._flags.pop(key, None)

    def clear(self) -> None:
        """Forget what is known of gradients, and of the steps since the loss scale was adjusted last."""
        self._flags.clear()
        self._group.clear()

    def _zero(self, device: torch.device) -> Tensor:
        last, used = self._last, (*self._flags.values(), *self._group.values())
        if last is not None and self._last_read is False and last.device == device and all(last is not f for f in used):
            self._last = None
            return last  # still 0: a kernel less than a new one
        # the dtype is written out: manual optimization runs where the default dtype may be a half one
        return torch.zeros((), dtype=torch.float32, device=device)

    # ------------------------------------------------------------------ steps

    @contextmanager
    def stepping(self) -> Generator[None, None, None]:
        """Within, an optimizer steps for the one that decides: ``under_way`` is true."""
        before, self.under_way = self.under_way, True
        try:
            yield
        finally:
            self.under_way = before

    def begin_step(self, flag: Tensor) -> None:
        """``flag`` decides the step at hand."""
        self._last, self._last_read = flag, None

    def end_step(self, optimizer: Optimizer, flag: Tensor) -> None:
        """The optimizer stepped, or was held back; the loss scale is to be adjusted by ``flag``."""
        before = self._group.get(id(optimizer))
        self._group[id(optimizer)] = flag if before is None else torch.maximum(before, flag)

    def stepped(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer stepped since the loss scale was adjusted last."""
        return id(optimizer) in self._group

    @property
    def group_open(self) -> bool:
        """Whether any optimizer stepped since the loss scale was adjusted last."""
        return bool(self._group)

    def take_group(self) -> Tensor:
        """The maximum over the steps since the loss scale was adjusted last; the next step begins a new group."""
        flags = list(self._group.values())
        self._group.clear()
        return flags[0] if len(flags) == 1 else torch.stack(flags).amax()

    # ------------------------------------------------------------------ the last step

    @property
    def last(self) -> Tensor:
        """The flag of the last step."""
        return cast("Tensor", self._last)

    @property
    def last_read(self) -> bool | None:
        """Whether the last step was skipped; ``None`` where the host has not read it yet."""
        return self._last_read

    def read(self, flag: Tensor) -> bool:
        """``flag`` on the host; the last step's is read at most once."""
        return self.skipped if flag is self._last else bool(flag.item())

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped; a host read, once a step."""
        if self._last_read is None:
            self._last_read = bool(self.last.item())
        return self._last_read

    def restore(self, skipped: bool) -> None:
        """Take up whether the last step before a checkpoint was skipped."""
        self._last, self._last_read = None, skipped
