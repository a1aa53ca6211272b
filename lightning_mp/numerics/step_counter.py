"""Whether optimizer steps are skipped: the flag of each, their counts, and how many in a row were."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer


class StepCounter:
    """The flags and counts of one run's optimizer steps, kept on the device and read by the host only when asked.

    ``found_inf``, a flag for each optimizer, is an fp32 scalar on the gradients' device: 1 where they are not finite on
    some rank, else 0. So are the counts ``skipped`` and ``streak`` (skips in a row that count against the budget). What
    was read is kept until the next step.
    """

    def __init__(self) -> None:
        self.attempts = 0
        #: a step that was decided here is under way; any other is made by somebody else
        self.under_way = False
        #: of the gradients that each optimizer steps with next
        self._flags: dict[int, Tensor] = {}
        #: of every step since the loss scale was adjusted last
        self._group: dict[int, Tensor] = {}
        self._sync: Callable[[Tensor], None] | None = None
        self._last: Tensor | None = None
        self._last_read: bool | None = False
        self._skipped: Tensor | None = None
        self._streak: Tensor | None = None
        self._counts_read: tuple[int, int] | None = (0, 0)
        self._next_check = 0

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

    def take(self, optimizer: Optimizer, device: torch.device) -> Tensor:
        """The same, and forget it."""
        flag = self.of(optimizer, device)
        self.drop(id(optimizer))
        return flag

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

    # ------------------------------------------------------------------ the last step, and all of them

    @property
    def last(self) -> Tensor:
        """The flag of the last step."""
        assert self._last is not None, "begin_step() comes first"
        return self._last

    def read(self, flag: Tensor) -> bool:
        """``flag`` on the host; the last step's is read at most once."""
        return self.step_skipped if flag is self._last else bool(flag.item())

    @property
    def step_skipped(self) -> bool:
        """Whether the last step was skipped; a device sync, once a step."""
        if self._last_read is None:
            self._last_read = bool(self.last.item())
        return self._last_read

    def record(self, counts: Tensor | int = 1) -> None:
        """Count the last step as skipped or applied, as its ``found_inf`` says.

        ``counts`` (0 or 1) says whether a skip counts against the budget.
        """
        self.attempts += 1
        was_skipped = self._last_read
        if isinstance(counts, int) and self._skipped is None and self._counts_read and was_skipped is not None:
            # The host asked for every flag so far (an optimizer that cannot take it): no device is needed to count.
            skipped, streak = self._counts_read
            self._counts_read = (skipped + 1, streak + counts) if was_skipped else (skipped, 0)
            return
        flag = self.last
        skips, in_a_row = self._on(flag.device)
        skips.add_(flag)
        in_a_row.add_(counts).mul_(flag)
        self._counts_read = None

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped; a device sync, once a step."""
        return self._counts()[0]

    @property
    def skipped(self) -> Tensor | int:
        """The same without a read: a number where the host knows it, else the device scalar that is counted in."""
        return self._skipped if self._counts_read is None and self._skipped is not None else self._counts()[0]

    @property
    def applied_steps(self) -> int:
        """How many steps were applied; a device sync, once a step."""
        return self.attempts - self.skipped_steps

    @property
    def streak(self) -> int:
        """How many skips in a row, the last one included, count against the budget; a device sync, once a step."""
        return self._counts()[1]

    def exceeds(self, allowed: int) -> int:
        """How many skips in a row count, where that is more than ``allowed``, else 0.

        The host asks the device on the earliest step on which it can be so.
        """
        if self.attempts < self._next_check:
            return 0
        streak = self.streak
        if streak <= allowed:
            self._next_check = self.attempts + allowed + 1 - streak
        return streak if streak > allowed else 0

    def check_next(self) -> None:
        """Ask again on the next step, whatever was known."""
        self._next_check = self.attempts + 1

    def end_streak(self) -> None:
        """The skips so far count no more against the budget."""
        self.load_state_dict({**self.state_dict(), "streak": 0})
        self.check_next()

    def state_dict(self) -> dict[str, int | bool]:
        """The counts as Python numbers."""
        return {
            "applied_steps": self.applied_steps,
            "skipped_steps": self.skipped_steps,
            "streak": self.streak,
            "step_skipped": self.step_skipped,
        }

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Resume from the counts of a checkpoint."""
        skipped, streak = int(state["skipped_steps"]), int(state["streak"])
        self.attempts = int(state["applied_steps"]) + skipped
        self._skipped = self._streak = None  # placed again, with these values, by the next step
        self._counts_read = (skipped, streak)
        self._last, self._last_read = None, bool(state.get("step_skipped"))

    def _counts(self) -> tuple[int, int]:
        if self._counts_read is None:
            assert self._skipped is not None, "record() places the counts"
            assert self._streak is not None
            skipped, streak = torch.stack((self._skipped, self._streak)).tolist()
            self._counts_read = (int(skipped), int(streak))
        return self._counts_read

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._skipped is None or self._streak is None:
            skipped, streak = self._counts()
            # Not the default dtype: under manual optimization that may be a half one, which cannot count past 256.
            self._skipped = torch.full((), float(skipped), dtype=torch.float32, device=device)
            self._streak = torch.full((), float(streak), dtype=torch.float32, device=device)
        return self._skipped, self._streak
