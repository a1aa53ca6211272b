"""From ``[CONFIG] key=value …`` to one config: Hydra composes the user's file with this package's groups."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import pydoc
import re
import sys
import time
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning_mp.errors import Faults, MissingExtraError, did_you_mean, one_line
from lightning_mp.policy import precision_word
from lightning_mp.policy.load import HYDRA_KEYS, Places
from lightning_mp.policy.precision_policy import precision_fix
from lightning_mp.policy.presets import PRESETS

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

#: the package's groups, and the config that chooses from each
GROUPS, ROOT = Path(str(files("lightning_mp.configs"))), "lightning_mp"
_PRIMARY = "lightning_mp_command"
#: what a file or the command line has to say, and how
_SAID = {"plan": "plan=bf16", "model": "model=llama_tiny", "data": "data=library_text"}
SECTIONS = (*_SAID, "strategy", "trainer", "callbacks")
#: how keys begin that are in every config, or may be
_KEYS = (*(f"{section}." for section in SECTIONS), "seed", "ckpt_path", "run_dir")
#: the field that a section of one word gives
_FIELD = {"plan": "precision", "strategy": "name"}
#: Trainer arguments, and where they are set instead
_ELSEWHERE = {"callbacks": "callbacks", "precision": "plan.precision", "strategy": "strategy"}
#: the command logs by itself, and has its own folder for a run that names none
_HYDRAS_PART = ("~hydra/output", "hydra/job_logging=none", "hydra/hydra_logging=none")
#: how the processes that a run starts know its folder
RUN_DIR = "LIGHTNING_MP_RUN_DIR"


@contextmanager
def composed(
    arguments: Sequence[str],
    command: str,
    faults: Faults,
    config_dirs: Sequence[Path] = (),
    *,
    needed: Collection[str] = ("model", "plan"),
    **replaced: Any,
) -> Generator[tuple[dict[str, Any], Places]]:
    """The config that the arguments describe, and where its keys were written; a project's modules can be imported.

    It is of plain, resolved values, without the sections that have a fault. ``run_dir`` is set, and ``replaced`` are
    sections to put in place of what was composed.

    Raises:
        PlanError: no such file, or arguments that Hydra cannot compose; with what was noted in ``faults`` before.
        MissingExtraError: Hydra is not installed.
    """
    if not arguments and command != "train":
        faults.add(f"{command} without a run", fix=f"write lightning-mp {command} run.yaml")
        faults.raise_if_any()
    path, overrides = _split(arguments)
    experiment = next((text.partition("=")[2] for text in overrides if text.startswith("experiment=")), "train")
    stem, places = experiment if path is None else path.stem, Places()
    home = Path(f"runs/{file_name(stem if command == 'train' else command)}-{time.strftime('%Y%m%d-%H%M%S')}")
    # searched first: else this package's groups would hide the user's of the same name
    folders = [*([] if path is None else [path.parent]), *config_dirs, GROUPS]
    with _importable(path):
        with _hydra(folders[0], stem):
            with _hydra_errors(faults, path):
                written = None if path is None else _mapping(path, places, faults)
                whole = _composed(stem, written, _parsed(overrides), folders)
                whole["run_dir"] = str(_folder(whole, home))
            places.update((each.key_or_group, "on the command line") for each in _parsed(overrides))
            whole.update(replaced)
            config = _checked(whole, needed, faults)
        yield config, places  # Lightning starts other processes in another way where Hydra is on


def sweep(arguments: Sequence[str], faults: Faults) -> tuple[list[str], list[list[str]]]:
    """What all runs of a sweep are given, and what each one is."""
    path, overrides = _split(arguments)
    with _hydra(GROUPS, "sweep"), _hydra_errors(faults, path):
        swept = [each for each in _parsed(overrides) if each.is_sweep_override()]
        choices = [
            [f"{str(each.input_line).partition('=')[0]}={value}" for value in each.sweep_string_iterator()]
            for each in swept
        ]
    lines = [each.input_line for each in swept]
    return [text for text in arguments if text not in lines], [list(chosen) for chosen in itertools.product(*choices)]


def _split(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The config file, wherever it stands, and the other arguments; a path may have ``=`` in it."""
    for index, text in enumerate(arguments):
        names_file = text.endswith((".yaml", ".yml")) and Path(text).is_file()
        if names_file or ("=" not in text and not text.startswith("~")):
            return Path(text), [*arguments[:index], *arguments[index + 1 :]]
    return None, list(arguments)


def file_name(text: str) -> str:
    """``text`` without what a file's name should not have."""
    return re.sub(r"[^\w=,.+-]", "_", text)[:120]


@contextmanager
def _importable(config: Path | None) -> Generator[None]:
    """Where a project's own modules are: the present folder, as for ``python -m``, and that of the config."""
    before = list(sys.path)
    sys.path[:] = [str(Path.cwd()), *before, *([] if config is None else [str(config.resolve().parent)])]
    try:
        yield
    finally:
        sys.path[:] = before


@contextmanager
def _hydra(folder: Path, name: str) -> Generator[None]:
    """Hydra's compose API on ``folder``; what it keeps for the process is as before afterwards."""
    try:
        from hydra import initialize_config_dir
        from hydra.core.config_store import ConfigStore
        from hydra.core.hydra_config import HydraConfig
    except ImportError as error:
        raise MissingExtraError("hydra-core", "hydra", "composing a config") from error

    store, before = ConfigStore.instance(), HydraConfig.instance().cfg
    store.store(_PRIMARY, {"defaults": [ROOT]})  # ROOT is on the search path, which the primary config may name
    try:
        with initialize_config_dir(str(folder.resolve()), name, version_base="1.3"):
            yield
    finally:
        HydraConfig.instance().cfg = before
        store.repo.pop(f"{_PRIMARY}.yaml", None)


@contextmanager
def _hydra_errors(faults: Faults, path: Path | None) -> Generator[None]:
    """Turn what Hydra, OmegaConf or PyYAML raise into one fault, in their words."""
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, HydraException) else error
        said = one_line(cause).partition(" Config search path:")[0]
        fix = "+key=value adds a key, and a value with commas, braces or spaces wants quotes"
        if isinstance(cause, MissingConfigException) and cause.options:
            group, _, option = str(cause.missing_cfg_file).rpartition("/")
            known, other = list(cause.options), "choose one of these, or check --config-dir"
            fix = precision_fix(option, (), known) if group == "plan" else did_you_mean(option, known, other)
        where = "" if path is None or path.name in said else f"{path.name}: "
        faults.add(f"the config does not compose: {where}{said}", fix=fix)
        faults.raise_if_any()


# ---------------------------------------------------------------------- composed


def _mapping(path: Path, places: Places, faults: Faults) -> dict[str, Any]:
    """What a file says; its keys are noted in ``places``."""
    from omegaconf import OmegaConf

    if not path.is_file():
        faults.add(f"config {str(path)!r}, which is no file", fix="check the path")
    else:
        body: Any = OmegaConf.to_container(OmegaConf.load(path))
        if isinstance(body, dict):
            places.add(path)
            return cast("dict[str, Any]", body)
        faults.add(f"config {str(path)!r}, which is no mapping", fix="write 'plan:' in it")
    faults.raise_if_any()
    return {}


def _parsed(overrides: Sequence[str]) -> list[Override]:
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(list(overrides))


def _composed(
    stem: str, written: dict[str, Any] | None, parsed: Sequence[Override], folders: Sequence[Path]
) -> DictConfig:
    """The whole config, with Hydra's own section.

    A file with a defaults list is Hydra's, as it is, and the package adds the sections that it lacks. Another file is
    laid over the package's config, and so is what the command line says and is no choice from a group.
    """
    from hydra import compose
    from hydra.core.override_parser.types import OverrideType
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError

    own = OmegaConf.select(OmegaConf.create(written or {}), "hydra.searchpath") or []
    searchpath = [*own, *(f"file://{folder.resolve()}" for folder in folders[1:])]
    hydras = [*_HYDRAS_PART, f"hydra.searchpath={json.dumps(searchpath)}"]
    if written is not None and "defaults" in written:
        values = [each for each in parsed if each.type is OverrideType.CHANGE and each.key_or_group.startswith(_KEYS)]
        lines = [str(each.input_line) for each in parsed if each not in values]
        whole = compose(stem, [*hydras, *lines], return_hydra_config=True)
        base: Any = OmegaConf.to_container(compose(_PRIMARY, hydras))
        body = {name: value for name, value in base.items() if name not in {*whole, *_SAID}}
    else:
        choices = {each.key_or_group: str(each.input_line) for each in parsed if _is_choice(each, folders)}
        values = [each for each in parsed if each.key_or_group not in choices]
        body = {name: value for name, value in (written or {}).items() if name not in choices}
        if isinstance(body.get("plan"), str) and body["plan"] in PRESETS:
            choices["plan"] = f"plan={body.pop('plan')}"
        if written is not None:
            body = {**dict.fromkeys(_SAID.keys() - choices), **body}
            if "experiment" in choices:
                raise ConfigKeyError(
                    f"{choices['experiment']}: next to a file, it goes into the file's own defaults list"
                )
        whole = compose(_PRIMARY, [*hydras, *choices.values()], return_hydra_config=True)
    OmegaConf.set_struct(whole, False)
    whole.update(body)
    for override in values:
        _set(whole, override)
    return whole


def _is_choice(override: Override, folders: Sequence[Path]) -> bool:
    """Whether it chooses from a group: no plan by its precision, no strategy by its name in a Trainer."""
    from lightning_mp.strategies.registry import LIGHTNINGS, PREFIX

    key, value = override.key_or_group, override.value()
    if override.is_hydra_override() or override.is_sweep_override():
        return True
    if not isinstance(value, str) or not any((folder / key).is_dir() for folder in folders):
        return False
    if key == "plan":
        return value in PRESETS or precision_word(value) is None
    return key != "strategy" or not (value.lower() in LIGHTNINGS or value.startswith(PREFIX))


def _set(whole: DictConfig, override: Override) -> None:
    """Set a key that is there or may be an argument; whether the class takes it is asked later.

    What is deeper in a model or in data, and in no call, may be a dict of the user's own, whose keys are known.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError

    _spell_out(whole)
    key, value = override.key_or_group, override.value()
    parent, _, name = key.rpartition(".")
    within: Any = (OmegaConf.select(whole, parent) or {}) if parent else whole
    new = key.startswith(_KEYS) and ("_target_" in within or not key.startswith(("model.", "data.")))
    if override.is_delete():
        within.pop(name)
    elif name in within or new or override.is_add() or override.is_force_add():
        OmegaConf.update(whole, key, value, merge=isinstance(value, dict) and bool(parent))
    else:
        raise ConfigKeyError(f"{override.input_line}: the config has no {key}")


def _spell_out(whole: DictConfig) -> None:
    """A plan or strategy of one word is the field that it gives, and one of make_strategy's its keywords alone."""
    from omegaconf import DictConfig, OmegaConf

    for section, field in _FIELD.items():
        given: Any = OmegaConf.select(whole, section)
        if isinstance(given, (str, int)):
            whole[section] = {field: given}
    strategy: Any = OmegaConf.select(whole, "strategy")
    if isinstance(strategy, DictConfig) and str(strategy.get("_target_")).endswith("make_strategy"):
        for key in ("plan", *HYDRA_KEYS):
            strategy.pop(key, None)


def _folder(whole: DictConfig, folder: Path) -> Path:
    """What a run asks for, to Hydra or as ``run_dir``, else ``folder``; that of the run whose process this is."""
    from omegaconf import OmegaConf

    if RUN_DIR in os.environ:
        return Path(os.environ[RUN_DIR])
    for key in ("hydra.run.dir", "run_dir"):
        _tell_hydra(whole, folder)
        folder = Path(str(OmegaConf.select(whole, key) or folder))
    return folder


def _tell_hydra(whole: DictConfig, folder: Path) -> None:
    """``${hydra:…}`` resolves as in an application of Hydra's that writes to ``folder``."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import read_write

    with read_write(whole.hydra):
        whole.hydra.runtime.output_dir = str(folder.absolute())
    HydraConfig.instance().set_config(whole)


# ---------------------------------------------------------------------- checked before anything is built


def _checked(whole: DictConfig, needed: Collection[str], faults: Faults) -> dict[str, Any]:
    """The config as plain values; sections in which something was noted are left out.

    Noted are sections of ``needed`` that are missing, values that are missing or do not resolve (in OmegaConf's words),
    ``_target_`` that name nothing, and keys that what they name does not take. The plan is checked where it is built.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _tell_hydra(whole, Path(whole.run_dir))
    _spell_out(whole)
    for name in (name for name in needed if not whole.get(name)):
        faults.add(f"no {name}", fix=f"write a section {name!r}, or choose one of the group: {_SAID[name]}")
    config: dict[str, Any] = {}
    for name in (str(name) for name in whole if name != "hydra"):
        before = len(faults.found)
        try:
            value = whole[name]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            key = error.full_key or name
            faults.add(f"{key}: {str(error).splitlines()[0]}", fix=f"give it a value: {key}=...")
            continue
        _check_calls(value, name, faults)
        if name == "trainer":
            _check_trainer(value, bool(whole.get("plan")), faults)
        if len(faults.found) == before:
            config[name] = value
    return config


def _check_trainer(given: Any, planned: bool, faults: Faults) -> None:
    if isinstance(given, dict):
        _check_calls({"_target_": "lightning_mp.compat.lightning.Trainer", **given}, "trainer", faults)
        for key in (key for key in _ELSEWHERE if key in given and planned):
            faults.add(f"trainer.{key} next to a plan", fix=f"set {_ELSEWHERE[key]} instead")
    else:
        faults.add(f"trainer={given!r} is no mapping", fix="write its arguments below it, as in max_steps: 100")


def _check_calls(value: Any, path: str, faults: Faults) -> None:
    """Note each ``_target_`` in ``value`` that is not there or does not take what is given; the plan checks its own."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _check_calls(item, f"{path}.{key}", faults)
    if not isinstance(value, dict) or "_target_" not in value:
        return
    given = {key: each for key, each in value.items() if not key.startswith("_")}
    target = str(value["_target_"])
    takes = signature_of(target)
    if not callable(_located(target)):
        fix = "check that package.module.Name imports"
        faults.add(f"{path}._target_: {target} names no class or function", fix=fix)
    elif not path.startswith("plan"):
        any_key = any(each.kind is each.VAR_KEYWORD for each in takes.parameters.values())
        unknown = [] if any_key else [key for key in given if key not in takes.parameters]
        for key in unknown:
            fix = did_you_mean(key, takes.parameters, "remove it")
            faults.add(f"{path}.{key}, which {target.rpartition('.')[2]} does not take", fix=fix)
        try:
            _ = unknown or value.get("_partial_") or value.get("_args_") or takes.bind(**given)
        except TypeError as error:
            faults.add(f"{path}: {error}", fix=f"{target} takes {', '.join(takes.parameters)}")


def signature_of(target: str) -> inspect.Signature:
    """What the class or function of that name takes: anything, where it does not say."""
    try:
        return inspect.signature(_located(target))
    except (TypeError, ValueError):
        return inspect.signature(lambda *_, **__: None)


def _located(target: str) -> Any:
    """What a ``_target_`` names, or ``None``; what the user's own module raises on import is raised."""
    try:
        return pydoc.locate(target)
    except pydoc.ErrorDuringImport as error:
        raise cast("Exception", error.value) from None
