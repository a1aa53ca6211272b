"""The parts of a run from its checked config. What can be refused without a model is, before there is one."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from lightning_mp.cli.config import RUN_DIR, checked, composed, located, parameters
from lightning_mp.comparison.run import fit_arguments
from lightning_mp.compat.lightning import (
    Callback,
    Checkpoint,
    CombinedLoader,
    LightningModule,
    MisconfigurationException,
    Trainer,
    seed_everything,
)
from lightning_mp.errors import Fault, Faults, MissingExtraError, PlanError, one_line
from lightning_mp.monitor.side_run import loss_of
from lightning_mp.numerics.rng import environment_kept
from lightning_mp.policy.load import HYDRA_KEYS, Places, plan_fault
from lightning_mp.precision import MixedPrecisionPlan
from lightning_mp.strategies.factory import make_strategy, trainer_kwargs

_FACTORY = "make_strategy"


@dataclass(frozen=True, slots=True)
class Regime:
    """A plan, and the Trainer's arguments that carry it out."""

    plan: MixedPrecisionPlan
    trainer: Mapping[str, Any]


class LastLoss(Callback):
    """Keeps the loss of the last batch, on its device."""

    loss: Any = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Lightning divided it by the number of micro-batches, under automatic optimization."""
        times = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        loss = loss_of(outputs)
        self.loss = loss.detach() * times if isinstance(loss, Tensor) else None

    def in_words(self) -> str:
        """As the end of a sentence; empty without a loss."""
        return "" if self.loss is None else f", last loss {float(self.loss.float().mean()):.4g}"


def regime(config: Mapping[str, Any], places: Places, faults: Faults) -> Regime | None:
    """Plan, strategy, callbacks and Trainer arguments; ``None`` with faults, earlier ones or its own."""
    before = len(faults.found)
    plan = plan_of(config["plan"], places, faults) if config.get("plan") else None
    if before:
        return None
    callbacks = _callbacks(config.get("callbacks"), str(config["run_dir"]), faults)
    arguments = trainer_arguments(config, faults)
    if arguments.get("enable_checkpointing") is False:
        callbacks = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
    strategy = "auto" if plan is None else strategy_of(config.get("strategy") or "auto", plan, faults)
    if plan is None or len(faults.found) > before:
        return None
    if arguments.get("default_root_dir") is None:
        arguments["default_root_dir"] = config.get("run_dir")
    try:
        return Regime(plan, trainer_kwargs(plan, strategy=strategy, callbacks=callbacks, **arguments))
    except PlanError as error:
        faults.extend(error.faults)
    return None


def trainer_arguments(config: Mapping[str, Any], faults: Faults) -> dict[str, Any]:
    """What the trainer section says, built; empty with a fault."""
    given = cast("Mapping[str, Any]", config.get("trainer") or {})
    return instantiated({key: value for key, value in given.items() if key not in HYDRA_KEYS}, "trainer", faults) or {}


def model(config: Mapping[str, Any], faults: Faults) -> LightningModule | None:
    """The LightningModule of the model section."""
    return instantiated(config["model"], "model", faults, LightningModule)


def data(config: Mapping[str, Any], faults: Faults) -> dict[str, Any]:
    """The data section as arguments of ``Trainer.fit``: a LightningDataModule, one loader, or ``train`` and ``val``."""
    built = instantiated(config.get("data"), "data", faults)
    if isinstance(built, (str, int, float)):
        faults.add(f"data: {built!r}", "a _target_, or the keys train and val", "write '_target_: package.Class'")
        return {}
    if not isinstance(built, dict):
        return fit_arguments(built)
    loaders = cast("dict[str, Any]", built)
    if "train" not in loaders or loaders.keys() - {"train", "val"}:
        faults.add(f"data: the keys {', '.join(loaders)}", "a _target_, or the keys train and val", "write one of them")
    return {"train_dataloaders": loaders.get("train"), "val_dataloaders": loaders.get("val")}


def training_batches(loaders: Mapping[str, Any], model: LightningModule) -> Any:
    """What ``Trainer.fit`` would iterate over, of what :func:`data` gave; the datamodule prepares itself for it."""
    source: Any = loaders.get("datamodule")
    if source is not None:
        source.prepare_data()
        source.setup("fit")
    given: Any = loaders.get("train_dataloaders")  # whose truth would be its length
    given = (model if source is None else source).train_dataloader() if given is None else given
    if not isinstance(given, (dict, list, tuple)):
        return given
    several = CombinedLoader(cast("Any", given), "max_size_cycle")
    return (batch for batch, *_ in iter(several))


@contextmanager
def one_run(
    arguments: Sequence[str], faults: Faults, command: str, config_dirs: Sequence[Path], **replaced: Any
) -> Generator[tuple[dict[str, Any], Regime]]:
    """Within, the run that the arguments of ``command`` describe: its checked config and its regime.

    Raises:
        PlanError: all that was noted in ``faults``, before and here.
    """
    with composed(arguments, command, faults, config_dirs) as (job,):
        config = {**checked(job, faults), **replaced}
        found = faults.sound(regime(config, job.places, faults))
        with running(Path(config["run_dir"]), faults):
            yield config, found


def parts(config: Mapping[str, Any], faults: Faults) -> tuple[LightningModule, dict[str, Any]]:
    """Model and data after the config's seed; the faults of both at once."""
    if config.get("seed") is not None:
        seed_everything(config["seed"], workers=True, verbose=False)
    built, loaders = model(config, faults), data(config, faults)
    return faults.sound(built), loaders


def trainer(arguments: Mapping[str, Any], faults: Faults) -> Trainer:
    """The Trainer itself."""
    built = None
    try:
        built = Trainer(**arguments)
    except PlanError as error:
        faults.extend(error.faults)
    except Exception as error:  # Lightning's own, of several kinds
        said = f"{type(error).__name__}: {one_line(error)}"
        faults.add(f"trainer: {said}", "what Lightning's Trainer takes", "fix the trainer or strategy section")
    return faults.sound(built)


@contextmanager
def running(folder: Path, faults: Faults) -> Generator[None]:
    """What Lightning cannot run is a fault; processes that it starts for the other ranks write to the same folder."""
    with environment_kept():
        os.environ[RUN_DIR] = str(folder)
        try:
            yield
        except MisconfigurationException as error:
            faults.add(f"what Lightning cannot run: {one_line(error)}", "parts that fit together", "fix what it names")
            faults.raise_if_any()


def plan_of(given: Any, places: Places, faults: Faults) -> MixedPrecisionPlan | None:
    """The plan of a plan section: a precision, the plan's fields, or a call, which is made where there is no fault."""
    if isinstance(given, Mapping) and _class_of(given) not in (None, "MixedPrecisionPlan", "PrecisionPolicy"):
        return None if faults.found else instantiated(given, "plan", faults, MixedPrecisionPlan)
    try:
        return MixedPrecisionPlan.from_config({"precision": given} if isinstance(given, (str, int)) else given)
    except PlanError as error:
        faults.extend(plan_fault(fault, places) for fault in error.faults)
    return None


def _class_of(section: Mapping[str, Any]) -> str | None:
    target = section.get("_target_")
    return None if target is None else str(target).rpartition(".")[2]


def strategy_of(given: Any, plan: MixedPrecisionPlan, faults: Faults) -> Any:
    """The strategy of a strategy section, for ``plan``: a name, keywords of make_strategy, or a class of the user's."""
    try:
        if isinstance(given, str):
            return make_strategy(given, plan)
        fields = dict(cast("Mapping[str, Any]", given))
        if not is_ours(fields):
            return instantiated(fields, "strategy", faults)
        fields.pop("plan", None)  # this very run's
        keywords = instantiated({k: v for k, v in fields.items() if k not in HYDRA_KEYS}, "strategy", faults)
        return None if keywords is None else make_strategy(keywords.pop("name", "auto"), plan, **keywords)
    except PlanError as error:
        faults.extend(error.faults)
    except MissingExtraError as error:
        faults.add(f"strategy: {error}", "an installed strategy", "install it, or choose another")
    return None


def is_ours(strategy: Any) -> bool:
    """Whether a strategy section is one of make_strategy's, by name or by its keywords."""
    if not isinstance(strategy, Mapping):
        return True
    return _class_of(cast("Mapping[str, Any]", strategy)) in (None, _FACTORY)


def _callbacks(given: Any, folder: str, faults: Faults) -> list[Callback]:
    """A mapping of name to callback (``null`` switches one off), or a list."""
    listed: Any = given if isinstance(given, (dict, list)) else [] if given is None else [given]
    entries = cast("dict[Any, Any]", listed if isinstance(listed, dict) else dict(enumerate(listed)))
    found: list[Callback | None] = []
    for name, entry in ((name, entry) for name, entry in entries.items() if entry is not None):
        part = f"callbacks.{name}"
        if not isinstance(entry, Mapping) or "_target_" not in entry:
            faults.add(f"{part}: {entry!r}", "a mapping with a _target_, or null", "write '_target_: package.Class'")
            continue
        found.append(instantiated(_homed(cast("Any", entry), folder), part, faults, Callback))
    return [callback for callback in found if callback is not None]


def _homed(entry: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """The entry, with the run's folder where a callback that writes names none."""
    takes = [parameter.name for parameter in parameters(located(str(entry["_target_"]))) or ()]
    homes = {"run_dir": folder, "dirpath": str(Path(folder) / "checkpoints")}
    return {**entry, **{key: home for key, home in homes.items() if key in takes and entry.get(key) is None}}


def instantiated(given: Any, part: str, faults: Faults, kind: type = object) -> Any:
    """What Hydra builds of ``given``, a ``kind``; a value that is no mapping or list as it is, ``None`` with a fault.

    Raises:
        InstantiationException: the code that is built raised anything but a refusal of this package or of Lightning.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        built = instantiate(given, _convert_="all") if isinstance(given, (dict, list)) else given
        if built is None or isinstance(built, kind):
            return built
        faults.add(f"{part}: a {type(built).__name__}", f"a {kind.__name__}", "give the _target_ of one")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, PlanError):
            faults.extend(Fault(f"{part}: {fault.given}", fault.allowed, fault.fix) for fault in cause.faults)
        elif isinstance(cause, (MissingExtraError, MisconfigurationException)):
            faults.add(f"{part}: {one_line(cause)}", "a part that can be built", "fix it, or its arguments")
        else:
            raise  # from the user's own code, whose traceback is shown
    return None
