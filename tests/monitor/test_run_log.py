from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_mp import MixedPrecisionPlan, PlanError
from lightning_mp.monitor.run_folder import RunFolder
from lightning_mp.monitor.run_log import open_folder, write_run
from support.models import Regression, batches
from support.running import fit


class Writes(Callback):
    """Opens the folder when a fit starts, writes a line a step, and closes it."""

    def __init__(self, run_dir: Path | None = None, name: str = "Writes") -> None:
        self.run_dir, self.name = run_dir, name
        self.folder: RunFolder | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.folder = open_folder(trainer, self.run_dir, self.name)
        assert self.folder is not None
        write_run(self.folder, trainer, "running")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        assert self.folder is not None
        self.folder.metrics(trainer.global_step, {})

    def teardown(self, *_: Any, **__: Any) -> None:
        if self.folder is not None:
            self.folder.close(self.name)


def _steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_without_a_run_dir_it_is_the_loggers_folder(tmp_path: Path) -> None:
    writes, logger = Writes(), CSVLogger(tmp_path)
    fit(Regression(), logger=logger, callbacks=[writes], max_steps=2)
    assert _steps(Path(logger.log_dir)) == [1, 2]


def test_without_a_logger_it_is_under_the_root_folder(tmp_path: Path) -> None:
    fit(Regression(), callbacks=[Writes()], max_steps=2, default_root_dir=tmp_path)
    assert _steps(tmp_path / "lightning_mp_run") == [1, 2]


def test_a_second_fit_of_a_trainer_goes_on_and_another_trainer_starts_over(tmp_path: Path) -> None:
    writes, module = Writes(tmp_path), Regression()
    trainer = fit(module, callbacks=[writes], max_steps=2)
    trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = 2, 3
    trainer.fit(module, batches())
    assert _steps(tmp_path) == [1, 2, 3]
    fit(Regression(), callbacks=[Writes(tmp_path)], max_steps=1)
    assert _steps(tmp_path) == [1]


def test_two_of_one_kind_in_one_folder_are_refused(tmp_path: Path) -> None:
    callbacks = [Writes(tmp_path), Writes(tmp_path)]
    with pytest.raises(PlanError, match="Give each run a run_dir of its own"):
        fit(Regression(), callbacks=callbacks, max_steps=1)
    for callback in callbacks:
        callback.teardown()


def test_run_json_says_what_ran_and_on_what(tmp_path: Path) -> None:
    plan = MixedPrecisionPlan("16-mixed")
    fit(Regression(), plugins=[plan], callbacks=[Writes(tmp_path)], max_steps=1)
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["status"], run["error"], run["precision"]) == ("running", None, "16-mixed")
    assert run["plan"] == plan.policy.to_dict()
    assert run["versions"]["torch"] == torch.__version__
    assert run["machine"]["processes"] == 1
    assert run["trainer"]["max_steps"] == 1


def test_a_failure_is_written_with_its_error(tmp_path: Path) -> None:
    class Fails(Writes):
        def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
            assert self.folder is not None
            write_run(self.folder, trainer, "failed", exception)
            self.folder.close(self.name)

        def on_train_batch_start(self, *_: Any) -> None:
            raise ValueError("no more data")

    with pytest.raises(ValueError, match="no more data"):
        fit(Regression(), callbacks=[Fails(tmp_path)], max_steps=1)
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["status"], run["error"], run["plan"]) == ("failed", "ValueError: no more data", None)
