"""The parts of a run from its checked config. What can be refused without a model is, before there is one."""

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
    """A plan, and the Trainer's arguments that carry it out."""

    plan: MixedPrecisionPlan
    trainer: dict[str, Any]


def regime(config: Mapping[str, Any], places: Places, faults: Faults) -> Regime | None:
    """Plan, strategy, callbacks and Trainer arguments; ``None`` with faults, earlier ones or its own."""
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
    """Within, the run that the arguments of ``command`` describe: its checked config and its regime."""
    with composed(arguments, command, faults, config_dirs, **replaced) as (config, places):
        checked = faults.unwrap(regime(config, places, faults))
        with running(Path(config["run_dir"]), faults), quiet():
            yield config, checked


@contextmanager
def running(folder: Path, faults: Faults) -> Generator[None]:
    """What Lightning cannot run is a fault; processes that it starts for the other ranks write to the same folder."""
    with environment_kept():
        os.environ[RUN_DIR] = str(folder)
        try:
            yield
        except MisconfigurationException as error:
            faults.add(f"Lightning cannot run this: {one_line(error)}", fix="fix what it names")
            faults.raise_if_any()


# ---------------------------------------------------------------------- a part of the config


def trainer_arguments(config: Mapping[str, Any], faults: Faults) -> dict[str, Any]:
    """What the trainer section says, built; empty with a fault."""
    given = {key: value for key, value in (config.get("trainer") or {}).items() if key not in HYDRA_KEYS}
    return instantiated(given, "trainer", faults) or {}


def trainer(arguments: Mapping[str, Any], faults: Faults) -> Trainer:
    """The Trainer itself; more processes of a CPU than it can hold are refused before they take its memory."""
    devices, cores = arguments.get("devices"), os.cpu_count() or 1
    on_cpu = arguments.get("accelerator") == "cpu" or not (cuda.is_available() or mps.is_available())
    if on_cpu and is_whole(devices) and devices > 4 * cores:
        faults.add(f"trainer.devices={devices}, processes on {counted(cores, 'core')}", fix="write 1 or 2")
        faults.raise_if_any()
    try:
        return Trainer(**arguments)
    except PlanError:
        raise
    except Exception as error:  # Lightning's own, of several kinds
        faults.add(f"trainer: {type(error).__name__}: {one_line(error)}", fix="fix the trainer or strategy section")
    return faults.unwrap(None)


def parts(config: Mapping[str, Any], faults: Faults) -> tuple[LightningModule, dict[str, Any]]:
    """Model and data after the config's seed; the faults of both at once."""
    if config.get("seed") is not None:
        seed_everything(config["seed"], workers=True, verbose=False)
    built = instantiated(config["model"], "model", faults, LightningModule)
    loaders = data(config, faults)
    return faults.unwrap(built), loaders


def data(config: Mapping[str, Any], faults: Faults) -> dict[str, Any]:
    """The data section as arguments of ``Trainer.fit``: a LightningDataModule, one loader, or ``train`` and ``val``."""
    built = instantiated(config.get("data"), "data", faults)
    if isinstance(built, dict) and "train" in built and built.keys() <= {"train", "val"}:
        return {f"{name}_dataloaders": loader for name, loader in built.items()}
    if isinstance(built, (dict, str, int)):
        said = f"the keys {', '.join(map(str, built))}" if isinstance(built, dict) else repr(built)
        faults.add(f"data: {said}", fix="write '_target_: package.Class', or the keys train and val")
        return {}
    return fit_arguments(built)


def model_and_batches(config: Mapping[str, Any], faults: Faults) -> tuple[LightningModule, Any]:
    """The model, and what ``Trainer.fit`` would iterate over."""
    model, loaders = parts(config, faults)
    source: Any = loaders.get("datamodule")
    if source is not None:
        source.prepare_data()
        source.setup("fit")
    given: Any = loaders.get("train_dataloaders")  # whose truth would be its length
    given = (model if source is None else source).train_dataloader() if given is None else given
    if isinstance(given, (dict, list, tuple)):
        given = (batch for batch, *_ in iter(CombinedLoader(cast("Any", given), "max_size_cycle")))
    return model, given


def _plan(given: Any, places: Places, faults: Faults) -> MixedPrecisionPlan | None:
    """The plan's fields, or a call, which is made where there is no fault."""
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

    With a fault ``None`` is returned. A fault names the line of its key, where ``places`` has it.
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
    """From a mapping (``null`` switches one off) or a list; those without a folder of their own write to the run's."""
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
    """What Hydra builds of ``given``, a ``kind``; what is no mapping or list as it is; ``None`` with a fault."""
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
            raise  # from the user's own code, whose traceback is shown
    return None
