"""The plan in the loggers: to be seen in each of Lightning's, harmless to users' loggers and to loading a module."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lightning_mp import MixedPrecisionPlan
from support.models import Regression
from support.running import fit

PLAN = {"pins": {"net.1": "fp32"}}


def run(module: Any, logger: Any, mode: str = "bf16-mixed") -> Any:
    trainer = fit(module, plugins=[MixedPrecisionPlan(mode, **PLAN)], logger=logger, max_steps=1)
    trainer.save_checkpoint(Path(trainer.default_root_dir) / "saved.ckpt")
    return trainer


class NoMetrics(TensorBoardLogger):
    """As written for Lightning before 1.0 had ``metrics``."""

    def log_hyperparams(self, params: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().log_hyperparams(params)


class ReadsAKey(CSVLogger):
    def log_hyperparams(self, params: Any = None) -> None:
        super().log_hyperparams({"rate": params["lr"]})


class Own(Logger):
    """It reads a key, and keeps what the last call gave it."""

    name, version = "own", 0

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        pass

    def log_hyperparams(self, params: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.calls.append({"lr": params["lr"]})


class WithRate(Regression):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger, NoMetrics, ReadsAKey])
def test_the_plan_is_in_hparams_yaml_beside_the_modules_own(kind: Any, tmp_path: Path) -> None:
    logger = kind(tmp_path)
    run(WithRate(), logger)
    written = yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text())
    assert written.pop("precision_plan") == {
        **MixedPrecisionPlan("bf16-mixed").policy.to_dict(),
        "pins": "{'net.1': 'fp32'}",
    }
    assert written == ({"rate": 0.1} if kind is ReadsAKey else {"lr": 0.1})


def test_an_own_logger_is_called_as_under_stock() -> None:
    calls = []
    for host in ({"precision": "32-true"}, {"plugins": [MixedPrecisionPlan("32-true")]}):
        for module in (Regression(), WithRate()):
            logger = Own()
            fit(module, logger=logger, max_steps=1, **host)
            calls.append(logger.calls)
    assert calls[:2] == calls[2:] == [[], [{"lr": 0.1}]]


def test_wandb_and_mlflow_have_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb: Any = pytest.importorskip("wandb")
    mlflow: Any = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    run(WithRate(), logger)
    config = dict(logger.experiment.config)
    assert (config["precision_plan"]["precision"], config["lr"]) == ("bf16-mixed", 0.1)
    wandb.finish()
    store = f"file:{tmp_path}/mlruns"
    logger = MLFlowLogger(tracking_uri=store)
    run(WithRate(), logger)
    parameters = mlflow.MlflowClient(store).get_run(logger.run_id).data.params
    assert (parameters["precision_plan/precision"], parameters["lr"]) == ("bf16-mixed", "0.1")
    # a parameter of MLflow may not change: another mode in the same run is said, and the run goes on
    run(WithRate(), MLFlowLogger(tracking_uri=store, run_id=logger.run_id), mode="32-true")


class Takes(Regression):
    """As neuralforecast and darts write it: what a module does not know goes to its Trainer."""

    def __init__(self, lr: float = 0.1, **trainer_kwargs: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.given = trainer_kwargs


class TakesOne(Regression):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters(config)
        self.given = config


class Filters(Regression):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.given = dict(self.hparams)


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
@pytest.mark.parametrize(
    ("module", "given"),
    [(Takes(max_epochs=3), {"max_epochs": 3}), (TakesOne({"lr": 0.5}), {"lr": 0.5}), (Filters(0.5), {"lr": 0.5})],
    ids=["any keyword", "one mapping", "named keywords"],
)
def test_a_module_is_loaded_from_its_hparams_file_without_the_plan(
    module: LightningModule, given: dict[str, Any], kind: Any, tmp_path: Path
) -> None:
    logger = kind(tmp_path)
    path = Path(run(module, logger).default_root_dir) / "saved.ckpt"
    folder = Path(logger.log_dir)
    loaded: Any = type(module).load_from_checkpoint(path, hparams_file=folder / "hparams.yaml")
    assert loaded.given == given
    files = [folder / "hparams.yaml", folder / "precision_plan.yaml"]
    (plan,) = [text for text in (file.read_text() for file in files if file.exists()) if "precision_plan:" in text]
    assert "precision: bf16-mixed" in plan
    assert "net.1" in plan


def test_a_users_file_of_that_name_stays(tmp_path: Path) -> None:
    file = tmp_path / "precision_plan.yaml"
    file.write_text("mine: 1\n")
    run(Takes(), TensorBoardLogger(tmp_path, name="", version=""))
    assert file.read_text() == "mine: 1\n"
    file.unlink()
    for mode in ("bf16-mixed", "32-true"):
        run(Takes(), TensorBoardLogger(tmp_path, name="", version=""), mode)
        assert yaml.safe_load(file.read_text())["precision_plan"]["precision"] == mode
