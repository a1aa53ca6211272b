"""How many optimizer steps were applied and skipped: counted on the device, read by the host only when asked."""

from __future__ import annotations

import torch
from torch import Tensor


class StepLedger:
    """Counts of optimizer steps.

    ``skipped`` and ``streak`` (skips in a row that count against the budget) are fp32 scalars on the gradients'
    device, so that recording a step never waits for it. Every reading is kept until the next step.
    """

    def __init__(self) -> None:
        self.attempts = 0
        self._skipped: Tensor | None = None
        self._streak: Tensor | None = None
        self._found: Tensor | None = None
        self._found_read: bool | None = False
        self._counts_read: tuple[int, int] | None = (0, 0)

    def open(self, found_inf: Tensor) -> None:
        """Begin a step whose flag is ``found_inf`` (0 or 1, fp32 scalar)."""
        self._found, self._found_read = found_inf, None

    def read(self, found_inf: Tensor) -> bool:
        """``found_inf`` on the host; the flag of the step at hand is read at most once."""
        if found_inf is not self._found:
            return bool(found_inf.item())
        if self._found_read is None:
            self._found_read = bool(found_inf.item())
        return self._found_read

    def record(self, found_inf: Tensor, counts: Tensor | int = 1) -> None:
        """Count a step as skipped where ``found_inf`` is 1, as applied where it is 0.

        ``counts`` (0 or 1) says whether a skip counts against the budget.
        """
        self.attempts += 1
        if isinstance(counts, int) and self._skipped is None and self._counts_read and self._found_read is not None:
            # The host asked for every flag so far (an optimizer that cannot take it): no device is needed to count.
            skipped, streak = self._counts_read
            self._counts_read = (skipped + 1, streak + counts) if self._found_read else (skipped, 0)
            return
        on_device = self._on(found_inf.device)
        on_device[0].add_(found_inf)
        on_device[1].add_(counts).mul_(found_inf)
        self._counts_read = None

    @property
    def known_clean(self) -> bool:
        """Whether the host has read the last flag already, and it was 0."""
        return self._found_read is False

    @property
    def step_skipped(self) -> bool:
        """Whether the last step was skipped; a host read, once a step."""
        return self.read(self._found) if self._found is not None else False

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped; a host read, once a step."""
        return self._counts()[0]

    @property
    def skipped(self) -> Tensor | int:
        """The same without a read: a number where the host knows it, else the device scalar that goes on counting."""
        return self._skipped if self._counts_read is None and self._skipped is not None else self._counts()[0]

    @property
    def applied_steps(self) -> int:
        """How many steps were applied; a host read, once a step."""
        return self.attempts - self.skipped_steps

    @property
    def streak(self) -> int:
        """How many skips in a row, the last one included, count against the budget; a host read, once a step."""
        return self._counts()[1]

    def state_dict(self) -> dict[str, int | bool]:
        """The counts as Python numbers."""
        return {
            "applied_steps": self.applied_steps,
            "skipped_steps": self.skipped_steps,
            "streak": self.streak,
            "step_skipped": self.step_skipped,
        }

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Take up the counts of a checkpoint."""
        skipped, streak = int(state["skipped_steps"]), int(state["streak"])
        self.attempts = int(state["applied_steps"]) + skipped
        self._skipped = self._streak = None  # placed again, with these values, by the next step
        self._counts_read = (skipped, streak)
        self._found, self._found_read = None, None
        if state.get("step_skipped"):
            self._found, self._found_read = torch.ones((), dtype=torch.float32), True

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
