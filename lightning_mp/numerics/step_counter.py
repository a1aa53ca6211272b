"""How many optimizer steps were applied and skipped: counted on the device, read by the host only when asked."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_mp.numerics.found_inf import FoundInf


class StepCounter:
    """Counts of optimizer steps.

    ``skipped`` and ``streak`` (skips in a row that count against the budget) are fp32 scalars on the gradients'
    device, so that recording a step never waits for it. What was read is kept until the next step.
    """

    def __init__(self, found_inf: FoundInf | None = None) -> None:
        self.found_inf = FoundInf() if found_inf is None else found_inf
        self.attempts = 0
        self._skipped: Tensor | None = None
        self._streak: Tensor | None = None
        self._counts_read: tuple[int, int] | None = (0, 0)

    def record(self, counts: Tensor | int = 1) -> None:
        """Count the last step as skipped or applied, as its ``found_inf`` says.

        ``counts`` (0 or 1) says whether a skip counts against the budget.
        """
        self.attempts += 1
        was_skipped = self.found_inf.last_read
        if isinstance(counts, int) and self._skipped is None and self._counts_read and was_skipped is not None:
            # The host asked for every flag so far (an optimizer that cannot take it): no device is needed to count.
            skipped, streak = self._counts_read
            self._counts_read = (skipped + 1, streak + counts) if was_skipped else (skipped, 0)
            return
        flag = self.found_inf.last
        skips, in_a_row = self._on(flag.device)
        skips.add_(flag)
        in_a_row.add_(counts).mul_(flag)
        self._counts_read = None

    @property
    def step_skipped(self) -> bool:
        """Whether the last step was skipped; a host read, once a step."""
        return self.found_inf.skipped

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped; a host read, once a step."""
        return self._counts()[0]

    @property
    def skipped(self) -> Tensor | int:
        """The same without a read: a number where the host knows it, else the device scalar that is counted in."""
        return self._skipped if self._counts_read is None and self._skipped is not None else self._counts()[0]

    @property
    def applied_steps(self) -> int:
        """How many steps were applied; a host read, once a step."""
        return self.attempts - self.skipped_steps

    @property
    def streak(self) -> int:
        """How many skips in a row, the last one included, count against the budget; a host read, once a step."""
        return self._counts()[1]

    def end_streak(self) -> None:
        """The skips so far count no more against the budget."""
        self.load_state_dict({**self.state_dict(), "streak": 0})

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
        self.found_inf.restore(bool(state.get("step_skipped")))

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
