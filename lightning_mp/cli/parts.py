"""Build the parts of a run from its checked config. Faults that need no model are found first."""

import os
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import cuda
from torch.backends import mps

from lightning_mp.cli.config import RUN_DIR, composed, signature_of
from lightning_mp.comparison.compare import fit_arguments, quiet
from lightning_mp.compat.lightning import (
    Callback,
    Checkpoint,
    CombinedLoader,
    LightningModule,
    MisconfigurationException,
    Trainer,
    seed_everything,
)
from lightning_mp.errors import Fault, Faults, MissingExtraError, PlanError, counted, is_whole, one_line
from lightning_mp.numerics.rng import environment_kept
from lightning_mp.plan.plan import MixedPrecisionPlan
from lightning_mp.policy.load import HYDRA_KEYS, Places, plan_fault
from lightning_mp.strategies.factory import make_strategy, trainer_kwargs


class Regime(NamedTuple):
    """A plan, and the Trainer's arguments for it: plugins, strategy and callbacks included."""

    plan: MixedPrecisionPlan
    trainer: dict[str, Any]


def regime(config: Mapping[str, Any], places: Places, faults: Faults) -> Regime | None:
    """Return the plan and the Trainer's arguments, with strategy and callbacks built.

    Return ``None`` if the config has no plan, or if ``faults`` holds a fault, an earlier one or one
    that is added here.
    """
    before = bool(faults.found)
    plan = _plan(config["plan"], places, faults) if config.get("plan") else None
    if plan is None or before:
        return None
    callbacks = _callbacks(config.get("callbacks"), str(config["run_dir"]), faults, places)
    arguments = trainer_arguments(config, faults)
    arguments["default_root_dir"] = arguments.get("default_root_dir") or config["run_dir"]
    if arguments.get("enable_checkpointing") is False:
        callbacks = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
    strategy = strategy_of(config.get("strategy"), plan, faults, places)
    try:
        if not faults.found:
            return Regime(plan, trainer_kwargs(plan, strategy=strategy, callbacks=callbacks, **arguments))
    except PlanError as error:
        faults.extend(error.faults)
    return None


@contextmanager
def one_run(
    arguments: Sequence[str], faults: Faults, command: str, config_dirs: Sequence[Path], **replaced: Any
) -> Generator[tuple[dict[str, Any], Regime]]:
    """Yield the checked config and the regime of the run that ``arguments`` describe.

    ``replaced`` are sections that replace the composed ones. Lightning is quiet meanwhile.

    Raises:
        PlanError: a fault was found, or Lightning refuses the run within the block.
    """
    with composed(arguments, command, faults, config_dirs, **replaced) as (config, places):
        checked = faults.unwrap(regime(config, places, faults))
        with running(Path(config["run_dir"]), faults), quiet():
            yield config, checked


@contextmanager
def running(folder: Path, faults: Faults) -> Generator[None]:
    """Raise PlanError if Lightning refuses the run within.

    ``LIGHTNING_MP_RUN_DIR`` is set to ``folder`` meanwhile, so that the processes which Lightning
    starts for other ranks write to the same folder. Afterwards the environment is put back.
    """
    with environment_kept():
        os.environ[RUN_DIR] = str(folder)
        try:
            yield
        except MisconfigurationException as error:
            faults.add(f"Lightning cannot run this: {one_line(error)}", fix="fix what it names")
            faults.raise_if_any()


# ---------------------------------------------------------------------- a part of the config


def trainer_arguments(config: Mapping[str, Any], faults: Faults) -> dict[str, Any]:
    """Return the arguments of the trainer section, built. Return an empty dict after adding a fault."""
    given = {key: value for key, value in (config.get("trainer") or {}).items() if key not in HYDRA_KEYS}
    return instantiated(given, "trainer", faults) or {}


def trainer(arguments: Mapping[str, Any], faults: Faults) -> Trainer:
    """Return the Trainer.

    Raises:
        PlanError: Lightning refuses the arguments, or they ask for more than four processes for
            each CPU core.
    """
    devices, cores = arguments.get("devices"), os.cpu_count() or 1
    on_cpu = arguments.get("accelerator") == "cpu" or not (cuda.is_available() or mps.is_available())
    if on_cpu and is_whole(devices) and devices > 4 * cores:
        faults.add(f"trainer.devices={devices}, processes on {counted(cores, 'core')}", fix="write 1 or 2")
        faults.raise_if_any()
    try:
        return Trainer(**arguments)
    except PlanError:
        raise
    except Exception as error:  # Lightning raises errors of several classes
        faults.add(f"trainer: {type(error).__name__}: {one_line(error)}", fix="fix the trainer or strategy section")
    return faults.unwrap(None)


def parts(config: Mapping[str, Any], faults: Faults) -> tuple[LightningModule, dict[str, Any]]:
    """Seed, and return the model and the data arguments of ``Trainer.fit``.

    Nothing is seeded if the config has no seed.

    Raises:
        PlanError: the model or the data is refused. All faults of both are reported together.
    """
    if config.get("seed") is not None:
        seed_everything(config["seed"], workers=True, verbose=False)
    built = instantiated(config["model"], "model", faults, LightningModule)
    loaders = data(config, faults)
    return faults.unwrap(built), loaders


def data(config: Mapping[str, Any], faults: Faults) -> dict[str, Any]:
    """Return the data section as arguments of ``Trainer.fit``.

    The section builds a LightningDataModule, one loader, or a mapping of ``train`` and ``val``.
    For other mappings, text and integers a fault is added and the dict is empty.
    """
    built = instantiated(config.get("data"), "data", faults)
    if isinstance(built, dict) and "train" in built and built.keys() <= {"train", "val"}:
        return {f"{name}_dataloaders": loader for name, loader in built.items()}
    if isinstance(built, (dict, str, int)):
        said = f"the keys {', '.join(map(str, built))}" if isinstance(built, dict) else repr(built)
        faults.add(f"data: {said}", fix="write '_target_: package.Class', or the keys train and val")
        return {}
    return fit_arguments(built)


def model_and_batches(config: Mapping[str, Any], faults: Faults) -> tuple[LightningModule, Any]:
    """Return the model, and the training batches that ``Trainer.fit`` would iterate over.

    A data module is prepared and set up for this. Several loaders are combined into one iterator.

    Raises:
        PlanError: the model or the data is refused.
    """
    model, loaders = parts(config, faults)
    source: Any = loaders.get("datamodule")
    if source is not None:
        source.prepare_data()
        source.setup("fit")
    given: Any = loaders.get("train_dataloaders")  # compared with None: an empty loader is false
    given = (model if source is None else source).train_dataloader() if given is None else given
    if isinstance(given, (dict, list, tuple)):
        given = (batch for batch, *_ in iter(CombinedLoader(cast("Any", given), "max_size_cycle")))
    return model, given


def _plan(given: Any, places: Places, faults: Faults) -> MixedPrecisionPlan | None:
    """Return the plan of a plan section, or ``None`` after adding a fault.

    A ``_target_`` other than the plan's own classes is called, unless a fault was found before.
    """
    target = given.get("_target_") if isinstance(given, Mapping) else None
    if target is not None and str(target).rpartition(".")[2] not in ("MixedPrecisionPlan", "PrecisionPolicy"):
        return None if faults.found else instantiated(given, "plan", faults, MixedPrecisionPlan)
    try:
        return MixedPrecisionPlan.from_config(given)
    except PlanError as error:
        faults.extend(plan_fault(fault, places) for fault in error.faults)
    return None


def strategy_of(given: Any, plan: MixedPrecisionPlan, faults: Faults, places: Places | None = None) -> Any:
    """Return the strategy of a strategy section for ``plan``: by keywords of make_strategy, or by a call.

    Return ``None`` after adding a fault, which names the line of its key if ``places`` knows it.
    """
    try:
        built = instantiated(given or {}, "strategy", faults)
        return make_strategy(built.pop("name", "auto"), plan, **built) if isinstance(built, dict) else built
    except PlanError as error:
        faults.extend(_placed(fault, given, "strategy", places) for fault in error.faults)
    except MissingExtraError as error:
        faults.add(f"strategy: {error}", fix="install it, or choose another")
    return None


def _placed(fault: Fault, section: Any, name: str, places: Places | None) -> Fault:
    """Return ``fault`` with the place of the first key of ``section`` that its problem names, if there is one."""
    words = re.findall(r"\w+", fault.problem)
    key = next((key for key in section if key in words), None) if isinstance(section, Mapping) else None
    place = None if places is None or key is None else places.get(f"{name}.{key}")
    return fault if place is None else replace(fault, problem=f"{fault.problem} ({place})")


def _callbacks(given: Any, folder: str, faults: Faults, places: Places) -> list[Callback]:
    """Return the callbacks of a mapping, in which ``null`` switches one off, or of a list.

    A callback without a ``run_dir`` or ``dirpath`` of its own gets the run's folder. A callback
    that cannot be built is left out, and a fault is added.
    """
    homes, callbacks = {"run_dir": folder, "dirpath": str(Path(folder) / "checkpoints")}, list[Callback]()
    listed = given if isinstance(given, (dict, list)) else [given]
    for name, entry in listed.items() if isinstance(listed, dict) else enumerate(listed):
        if isinstance(entry, Mapping) and "_target_" in entry:
            takes = signature_of(entry["_target_"]).parameters
            own = {key: home for key, home in homes.items() if key in takes and not entry.get(key)}
            built = instantiated({**entry, **own}, f"callbacks.{name}", faults, Callback)
            callbacks += [] if built is None else [built]
        elif entry is not None:
            where = places.get(f"callbacks.{name}")
            said = f"callbacks.{name}: {entry!r}" + (f" ({where})" if where else "")
            faults.add(said, fix="write '_target_: package.Class', or null")
    return callbacks


def instantiated(given: Any, part: str, faults: Faults, kind: type = object) -> Any:
    """Return the object that Hydra builds from ``given``.

    A value that is no mapping or list is returned as it is. If the result is no ``kind``, or this
    package or Lightning refuses the arguments, add a fault and return ``None``.

    Raises:
        InstantiationException: the user's own code raised an error.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        built = instantiate(given, _convert_="all") if isinstance(given, (dict, list)) else given
        if built is None or isinstance(built, kind):
            return built
        faults.add(f"{part}: a {type(built).__name__}, no {kind.__name__}", fix="give the _target_ of one")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, PlanError):
            faults.extend(replace(fault, problem=f"{part}: {fault.problem}") for fault in cause.faults)
        elif isinstance(cause, (MissingExtraError, MisconfigurationException)):
            fix = "run that line" if isinstance(cause, MissingExtraError) else "fix it, or its arguments"
            faults.add(f"{part}: {one_line(cause)}", fix=fix)
        else:
            raise  # the traceback leads to the user's own code
    return None
