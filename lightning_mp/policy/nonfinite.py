"""What happens to a step whose gradients are not finite."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, cast

from lightning_mp.errors import Faults
from lightning_mp.policy.expression import expression


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFinite:
    """What happens to a step whose gradients are not finite.

    With loss scaling an overflow is ordinary: only skips at the scale's floor count, and ``"ignore"`` still skips.

    Args:
        action: ``"skip"`` leaves it out, up to a budget; ``"raise"`` stops at the first; ``"ignore"`` applies it, as
            stock Lightning does.
        max_consecutive: how many in a row ``"skip"`` leaves out.
        on_budget: what one more leads to: ``"raise"`` ends the run, ``"rewind"`` loads the newest checkpoint of the
            Trainer's ``ModelCheckpoint`` whose weights are finite and continues after the bad batch.
        save_batch: save the batch of a skipped step, and the state of the random number generators before its forward,
            for :func:`~lightning_mp.callbacks.replay_saved`; at most 10 steps a run. It costs a host read a step.
        run_dir: the folder for ``nonfinite/*.pt`` and ``events.jsonl``; by default one of the run's own.
    """

    action: Literal["skip", "raise", "ignore"] = "skip"
    max_consecutive: int = 100
    on_budget: Literal["raise", "rewind"] = "raise"
    save_batch: bool = False
    run_dir: str | None = None

    __repr__ = expression

    def __post_init__(self) -> None:
        with Faults("NonFinite") as faults:
            faults.one_of("nonfinite", self.action, ("skip", "raise", "ignore"), "write 'skip', the default")
            faults.whole("max_consecutive", self.max_consecutive, 0, "write 100, the default")
            faults.one_of("on_budget", self.on_budget, ("raise", "rewind"), "write 'raise', the default")
            faults.one_of("save_batch", self.save_batch, (True, False), "write a boolean, without quotes")
            if self.run_dir is not None and not isinstance(cast("object", self.run_dir), (str, os.PathLike)):
                faults.add(f"run_dir={self.run_dir!r}", "a path", "leave it out for a folder of the run's own")
                return
            if self.action != "skip" and self.on_budget == "rewind":
                faults.add(
                    f"on_budget='rewind' with action={self.action!r}", "a budget of skips", "write action='skip'"
                )
            if self.action == "ignore" and self.save_batch:
                faults.add("save_batch=True with action='ignore'", "steps that are skipped", "write action='skip'")
        if self.run_dir is not None:
            object.__setattr__(self, "run_dir", os.fspath(self.run_dir))

    @property
    def watches(self) -> bool:
        """Whether batches have to be kept until their step is over."""
        return self.save_batch or self.on_budget == "rewind"
