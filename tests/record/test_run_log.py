import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_mp import MixedPrecisionPlan, NonFinite, PlanError
from lightning_mp.callbacks import LossScaleMonitor, NonFiniteGuard, PrecisionAudit, TrainingHealth
from lightning_mp.record.events import Event
from lightning_mp.record.run_log import RunLog, show_alert
from support.models import Regression, batches
from support.ranks import in_a_process
from support.running import fit
from support.terminal import Terminal

QUIET: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
#: what a user may have called a file of their own
OWN = ("metrics.jsonl", "run.json", "report.html", "events.jsonl", "audit.json")


class Writes(Callback):
    def __init__(self, run_dir: Path | str | None = None, name: str = "Writes") -> None:
        self.run_dir, self.written = run_dir, RunLog(name)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.written.open(trainer, self.run_dir)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.written.row(trainer.global_step - 1, {})

    def teardown(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self.written.close(trainer)


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    for name in OWN:
        (tmp_path / name).write_text("mine\n")
    yield tmp_path
    for name in OWN:
        assert (tmp_path / name).read_text() == "mine\n"


def _steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _folders(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.rglob("metrics.jsonl") if path.parent != root)


def _losses(folder: Path) -> list[int]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "train/loss" in row]


def test_without_a_run_dir_it_is_the_loggers_version_folder(tmp_path: Path) -> None:
    writes, logger = Writes(), CSVLogger(tmp_path)
    fit(Regression(), logger=logger, callbacks=[writes], max_steps=2)
    assert _steps(Path(logger.log_dir)) == [0, 1]


@pytest.mark.parametrize("logger", [lambda: CSVLogger(".", name="", version=""), lambda: False])
@pytest.mark.filterwarnings("ignore:Experiment logs")
def test_every_run_has_a_folder_of_its_own(in_folder: Path, logger: Callable[[], Any]) -> None:
    for steps in (2, 3):
        fit(Regression(), logger=logger(), callbacks=[TrainingHealth(report=False)], max_steps=steps)
    assert sorted(map(_losses, _folders(in_folder))) == [[0, 1], [0, 1, 2]]


def test_what_is_no_local_folder_is_replaced_by_one_said(in_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = CSVLogger("memory://logs")
    fit(Regression(), callbacks=[Writes()], logger=logger, max_steps=2, default_root_dir=in_folder / "root")
    assert _folders(in_folder) == [in_folder / "root" / "lightning_mp_run"]
    assert "is not a local folder: the files of this run are written below" in caplog.text
    with pytest.raises(PlanError, match="is not a local folder"):
        fit(Regression(), callbacks=[Writes("s3://bucket/run")], max_steps=2)
    assert not [*in_folder.glob("s3:*"), *in_folder.glob("memory:*")]


def test_a_second_fit_of_a_trainer_goes_on_and_another_trainer_starts_over(tmp_path: Path) -> None:
    writes, module = Writes(tmp_path), Regression()
    trainer = fit(module, callbacks=[writes], max_steps=2)
    trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = 2, 3
    trainer.fit(module, batches())
    assert _steps(tmp_path) == [0, 1, 2]
    fit(Regression(), callbacks=[Writes(tmp_path)], max_steps=1)
    assert _steps(tmp_path) == [0]


class _BadStep(Regression):
    def __init__(self, bad: int = 1) -> None:
        super().__init__()
        self.bad = bad

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (float("nan") if self.trainer.global_step == self.bad else 1.0)


def _stock(run_dir: Path | None) -> dict[str, Any]:
    watching = [TrainingHealth(run_dir), NonFiniteGuard(run_dir=run_dir), PrecisionAudit(run_dir=run_dir)]
    return {"callbacks": [*watching, LossScaleMonitor()]}


def _planned(run_dir: Path | None) -> dict[str, Any]:
    nonfinite = NonFinite(save_batch=True, run_dir=None if run_dir is None else str(run_dir))
    watching = [TrainingHealth(run_dir), PrecisionAudit(run_dir=run_dir), LossScaleMonitor()]
    return {"callbacks": watching, "plugins": [MixedPrecisionPlan("bf16-mixed", nonfinite=nonfinite)]}


@pytest.mark.parametrize(
    ("arguments", "strategy", "given", "ckpt_path"),
    [
        (_stock, "auto", True, "step"),
        (_stock, "auto", False, "last"),
        (_planned, "auto", False, "step"),
        pytest.param(_planned, "mp_fsdp2", True, "last", marks=pytest.mark.gloo),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")  # last.ckpt, by torch
def test_a_run_that_resumes_appends_and_no_step_stands_twice(
    tmp_path: Path, arguments: Callable[[Path | None], Any], strategy: str, given: bool, ckpt_path: str
) -> None:
    if strategy == "auto":
        _resumes(tmp_path, arguments, strategy, given, ckpt_path)
    else:
        in_a_process(_resumes, tmp_path, arguments, strategy, given, ckpt_path)


def _resumes(
    tmp_path: Path, arguments: Callable[[Path | None], Any], strategy: str, given: bool, ckpt_path: str
) -> None:
    folder = tmp_path / "run" if given else tmp_path / "lightning_mp_run"
    checkpoints = tmp_path / "checkpoints"

    def train(steps: int, ckpt: str | None = None) -> None:
        made = arguments(folder if given else None)
        saves = ModelCheckpoint(checkpoints, every_n_train_steps=4, save_last=True, filename="{step}")
        made["callbacks"].append(saves)
        options = {"strategy": strategy, "default_root_dir": tmp_path, "accelerator": "cpu", "logger": False}
        trainer = Trainer(**made, **options, max_steps=steps, enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(_BadStep(), batches(32), ckpt_path=ckpt)

    train(6)
    assert _losses(folder) == [*range(6)]
    audit, events = (folder / "audit.json").read_bytes(), (folder / "events.jsonl").read_bytes()
    saved = [*(folder / "nonfinite").iterdir()]
    assert len(saved) == 1
    train(10, "last" if ckpt_path == "last" else str(checkpoints / "step=4.ckpt"))
    assert _losses(folder) == [*range(10)]
    assert (folder / "events.jsonl").read_bytes().startswith(events)
    assert saved[0].exists()
    assert audit
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
    if not given:  # which is the folder of the run that is resumed, not of the one that came last
        train(3)
        assert _losses(tmp_path / "lightning_mp_run_2") == [0, 1, 2]
        train(12, str(checkpoints / "step=8.ckpt"))
        assert _losses(folder) == [*range(12)]
        assert _losses(tmp_path / "lightning_mp_run_2") == [0, 1, 2]


def test_a_folder_that_is_refused_leaves_no_hook_in_the_module(in_folder: Path) -> None:
    module = Regression()
    before = set(vars(module))
    with pytest.raises(PlanError, match="which this package did not write"):
        fit(module, **QUIET, callbacks=[TrainingHealth(in_folder, actions={"grad_norm_spike": "skip"})])
    assert not {name for name in vars(module).keys() - before if "step" in name}


@pytest.mark.parametrize(
    ("name", "cause"),
    [("file/run", "(FileExistsError|NotADirectoryError).*file"), ("\0", "ValueError: embedded null byte")],
)
def test_a_folder_that_cannot_be_made_is_named_with_its_cause(tmp_path: Path, name: str, cause: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=f"cannot be opened: {cause}"):
        fit(Regression(), callbacks=[PrecisionAudit(run_dir=tmp_path / name)], max_steps=1)


def test_a_folder_that_vanishes_is_warned_of_once_and_it_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Removes(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                for path in (tmp_path / "run").iterdir():
                    path.unlink()
                (tmp_path / "run").rmdir()
                (tmp_path / "run").touch()  # nor can it be made again, for the batch of the bad step

    module, watching = _BadStep(bad=3), [TrainingHealth(tmp_path / "run"), NonFiniteGuard(run_dir=tmp_path / "run")]
    with pytest.warns(UserWarning, match="bad batch of step 3 could not be saved: NotADirectoryError"):
        trainer = fit(module, callbacks=[*watching, Removes()], max_steps=4)
    assert trainer.global_step == 4
    assert sum("cannot be written" in record.message for record in caplog.records) == 1


def test_run_json_says_what_ran_and_on_what(tmp_path: Path) -> None:
    plan = MixedPrecisionPlan("16-mixed")
    fit(Regression(), plugins=[plan], callbacks=[Writes(tmp_path)], max_steps=1)
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["status"], run["error"], run["precision"]) == ("finished", None, "16-mixed")
    assert run["plan"] == plan.policy.to_dict()
    assert run["versions"]["torch"] == torch.__version__
    assert run["machine"]["processes"] == 1


@pytest.mark.parametrize("watches", [TrainingHealth, PrecisionAudit, NonFiniteGuard])
def test_a_failure_is_written_with_its_error(tmp_path: Path, watches: Any) -> None:
    class Fails(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise ValueError("no more data")

    with pytest.raises(ValueError, match="no more data"):
        fit(Fails(), callbacks=[watches(run_dir=tmp_path)], max_steps=1)
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["status"], run["error"], run["plan"]) == ("failed", "ValueError: no more data", None)


ALERT = Event(step=5, kind="scale_collapse", severity="error", cause="an overflow", advice="pin the head")


def test_an_alert_is_a_panel_on_a_terminal_and_a_line_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    show_alert("TrainingHealth", ALERT)
    assert f"TrainingHealth: {ALERT}" in caplog.text
    monkeypatch.setattr(logging.getLogger("lightning_mp"), "hasHandlers", lambda: False)  # pytest has its own
    with Terminal(80) as terminal:
        show_alert("TrainingHealth", ALERT)
    lines = [line.strip("│ ").rstrip() for line in terminal.text.splitlines()]
    assert lines[0].startswith("╭─ TrainingHealth: error ─")
    assert lines[1:4] == ["what step 5: scale collapse", "why  an overflow", "do   pin the head"]
    assert {len(line) for line in terminal.text.splitlines()} == {80}
