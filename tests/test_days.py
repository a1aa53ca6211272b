"""Days that people have: what is left of weights and files is what stock Lightning leaves, and the run's own folder.

Each day is one function of a Trainer's arguments. It runs with stock precision and with the plan and README's
callbacks; the weights are equal to the last bit, files that were there are as they were, and in the folder of each run
every step stands once.
"""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch import callbacks as lightnings
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from torch import Tensor, nn

from lightning_mp import MixedPrecisionPlan
from lightning_mp.callbacks import LossScaleMonitor, NonFiniteGuard, PrecisionAudit, TrainingHealth
from support.cells import WHOLE
from support.models import Regression, batches
from support.running import trainer as quiet_trainer

#: what a user may have called files of their own
MINE = ("metrics.jsonl", "run.json", "report.html", "events.jsonl", "audit.json", "last.ckpt")
Make = Callable[..., Trainer]
Day = Callable[[Make], Regression]


class Net(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Sequential(self.net[0], self.net[1]), self.net[3]
        self.lr = 1e-2
        self.make_optimizer = lambda parameters: torch.optim.SGD([p for p in parameters if p.requires_grad], lr=self.lr)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


class Stops(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.at:
            raise ZeroDivisionError


def _fit(trainer: Trainer, net: Net | None = None, **options: Any) -> Net:
    net = net or Net()
    trainer.fit(net, batches(), batches(rows=16), **options)
    return net


def _checkpoints(**options: Any) -> lightnings.ModelCheckpoint:
    return lightnings.ModelCheckpoint("kept", save_last=True, save_top_k=0, **options)


def _resume(make: Make) -> Net:
    _fit(make(callbacks=[_checkpoints()], max_epochs=1))
    return _fit(make(callbacks=[_checkpoints()], max_epochs=2), ckpt_path="kept/last.ckpt")


def _refit(make: Make) -> Net:
    trainer = make(max_epochs=1)
    net = _fit(trainer)
    trainer.fit_loop.max_epochs = 2
    return _fit(trainer, net)


def _another_trainer(make: Make) -> Net:
    return _fit(make(max_epochs=1), _fit(make(max_epochs=1)))


def _crash_and_resume(make: Make) -> Net:
    saves = {"every_n_train_steps": 2, "save_on_exception": True}
    with pytest.raises(ZeroDivisionError):
        _fit(make(callbacks=[_checkpoints(**saves), Stops(5)]))
    return _fit(make(callbacks=[_checkpoints(**saves)]), ckpt_path="kept/last.ckpt")


def _remote(make: Make) -> Net:
    trainer = make(max_epochs=1)
    _fit(trainer)
    trainer.save_checkpoint("memory://days/last.ckpt")
    return _fit(make(max_epochs=2), ckpt_path="memory://days/last.ckpt")


def _validate_and_predict(make: Make) -> Net:
    trainer = make(max_epochs=1)
    net = _fit(trainer)
    trainer.validate(net, batches(), verbose=False)
    return _fit(make(max_epochs=1), net)


def _with(*callbacks: Callable[[], Callback], **arguments: Any) -> Day:
    return lambda make: _fit(make(callbacks=[callback() for callback in callbacks], **arguments))


def _logger(logger: Callable[[], Any]) -> Day:
    return lambda make: _fit(make(logger=logger(), callbacks=[lightnings.LearningRateMonitor()]))


def _swa() -> Callback:
    return lightnings.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)


DAYS: dict[str, Day] = {
    "resume": _resume,
    "refit": _refit,
    "another trainer goes on": _another_trainer,
    "crash and resume": _crash_and_resume,
    "a remote checkpoint": _remote,
    "validation between two fits": _validate_and_predict,
    "moving average": _with(lambda: EMAWeightAveraging(decay=0.5)),
    "stochastic weight averaging": _with(_swa, max_epochs=4),
    "accumulation that changes": _with(lambda: lightnings.GradientAccumulationScheduler({0: 1, 1: 4})),
    "backbone finetuning": _with(lambda: lightnings.BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)),
    "early stopping": _with(lambda: lightnings.EarlyStopping("val_loss", patience=1, min_delta=1e9), max_epochs=5),
    "a learning rate that is found": _with(
        lambda: lightnings.LearningRateFinder(num_training_steps=4, update_attr=True)
    ),
    "clipping": _with(gradient_clip_val=0.1),
    "CSVLogger": _logger(lambda: CSVLogger(".")),
    "TensorBoardLogger": _logger(lambda: TensorBoardLogger(".")),
    "WandbLogger": _logger(lambda: WandbLogger(save_dir=".", offline=True)),
    "MLFlowLogger": _logger(lambda: MLFlowLogger(tracking_uri=f"file:{Path.cwd()}/mlruns")),
}


def _live(day: Day, folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: Callable[[], dict[str, Any]]) -> Any:
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in MINE:
        (folder / name).write_text("mine\n")

    def make(callbacks: Any = (), **options: Any) -> Trainer:
        own = arguments()
        callbacks = [*callbacks, *own.pop("callbacks", [])]
        saves = any(isinstance(callback, lightnings.ModelCheckpoint) for callback in callbacks)
        common = {"max_epochs": 2, "log_every_n_steps": 1, "enable_checkpointing": saves}
        return quiet_trainer(callbacks=callbacks, **{**common, **options}, **own)

    torch.manual_seed(0)
    net = day(make)
    assert all((folder / name).read_text() == "mine\n" for name in MINE)
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


#: the plan, and the callbacks beside stock precision
REGIMES: dict[str, Callable[[], dict[str, Any]]] = {
    "plan 32-true": lambda: {"plugins": [MixedPrecisionPlan("32-true")], "callbacks": _watching()},
    "plan bf16-mixed": lambda: {"plugins": [MixedPrecisionPlan("bf16-mixed")], "callbacks": _watching()},
    "stock bf16-mixed": lambda: {"precision": "bf16-mixed", "callbacks": [*_watching(), NonFiniteGuard()]},
}
#: each day under the plan; beside stock precision, which callbacks leave alone, two that save and resume
OFTEN = [(day, "plan bf16-mixed") for day in DAYS] + [
    (day, "stock bf16-mixed") for day in ("resume", "crash and resume")
]


def _watching() -> list[Callback]:
    return [TrainingHealth(), LossScaleMonitor(), PrecisionAudit()]


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def stock_runs() -> dict[Any, Any]:
    return {}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("day", "regime"), [pytest.param(*cell, marks=[] if cell in OFTEN else WHOLE) for cell in product(DAYS, REGIMES)]
)
def test_it_ends_as_under_stock_lightning(
    day: str, regime: str, stock_runs: dict[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    precision = regime.split()[1]
    if (day, precision) not in stock_runs:
        stock_runs[day, precision] = _live(DAYS[day], tmp_path / "stock", monkeypatch, lambda: {"precision": precision})
    stock = stock_runs[day, precision]
    ours = _live(DAYS[day], tmp_path / "ours", monkeypatch, REGIMES[regime])
    assert _equal(ours, stock)
    series = [path for path in (tmp_path / "ours").rglob("metrics.jsonl") if path.parent != tmp_path / "ours"]
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in series]
    steps = [[row["step"] for row in each if "train/loss" in row] for each in rows]
    assert steps
    assert [each for each in steps if each != sorted(set(each))] == []
