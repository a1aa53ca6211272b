"""What is done about a bad step once it was skipped, by a callback or by a plan: told, saved, rewound."""

from __future__ import annotations

from typing import Any

from lightning_mp.compat.lightning import LightningModule, Trainer, rank_zero_info
from lightning_mp.monitor.events import Event
from lightning_mp.monitor.nonfinite import messages, rewind
from lightning_mp.monitor.nonfinite.replay import Diagnosis, Replayer
from lightning_mp.monitor.nonfinite.saved_batch import SavedBatches
from lightning_mp.monitor.run_log import RunDir, end_run, open_folder


class BadSteps:
    """The events, saved batches and checkpoints of one run; every rank makes the same calls.

    ``writer`` is who writes, for people; ``rewinds`` whether a checkpoint may have to be loaded.

    Raises:
        PlanError: another run, or a second ``writer`` of this one, is writing to the folder.
    """

    def __init__(self, trainer: Trainer, run_dir: RunDir, writer: str, *, rewinds: bool) -> None:
        self._trainer, self._writer, self._rewinds = trainer, writer, rewinds
        self._folder = open_folder(trainer, run_dir, writer)
        path = None if self._folder is None else self._folder.path
        self._saved = SavedBatches(trainer, path)
        self._replayer, self._checkpoints = Replayer(), rewind.Checkpoints()

    def remember(self, batch: Any, batch_idx: int) -> None:
        """A batch begins: keep a reference to it, and note what checkpoints there are."""
        self._replayer.remember(self._trainer, batch, batch_idx)
        if self._rewinds:
            self._checkpoints.note(self._trainer)

    def forget(self) -> None:
        """The step of the batches that are kept is over."""
        self._replayer.forget()

    def locate(self, module: LightningModule) -> Diagnosis:
        """Run the batches of the step again, to see what broke it."""
        return self._replayer.locate(self._trainer, module)

    def name(self, diagnosis: Diagnosis, step: int) -> str | None:
        """The file in which the batch will be saved, for its event."""
        return self._saved.next_name(diagnosis, step)

    def save(self, diagnosis: Diagnosis, event: Event) -> None:
        """Save the batch."""
        self._saved.save(self._replayer.kept(diagnosis.batch_idx), event)

    def write(self, event: Event) -> None:
        """Write an event, and print it."""
        if self._folder is not None:
            self._folder.event(event)
        rank_zero_info(f"{self._writer}: {event}")

    def rewind(self, event: Event) -> None:
        """Load the newest checkpoint with finite weights.

        Raises:
            NonFiniteError: there is none.
        """
        path = self._checkpoints.rewind(self._trainer)
        if path is None:
            raise messages.nothing_to_rewind_to(event)
        rank_zero_info(f"{self._writer}: loaded {path}, and continues after the batch of step {event.step}")

    def close(self, error: BaseException | None = None) -> None:
        """The run is over, or has failed."""
        self._replayer.forget()
        folder, self._folder = self._folder, None
        if folder is not None:
            end_run(folder, self._trainer, self._writer, error)
