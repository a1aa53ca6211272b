"""From ``[CONFIG] key=value …`` to one config: Hydra composes the user's file with this package's groups."""

from __future__ import annotations

import inspect
import itertools
import os
import pydoc
import re
import sys
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning_mp.errors import Faults, MissingExtraError, did_you_mean, one_line
from lightning_mp.policy import precision_word
from lightning_mp.policy.load import Places
from lightning_mp.policy.precision_policy import precision_fix
from lightning_mp.policy.presets import PRESETS

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

#: the sections of a training file, and which file of its group a section comes from that the user's file lacks
SECTIONS: Mapping[str, str | None] = {
    "plan": None,
    "model": None,
    "data": None,
    "strategy": "auto",
    "trainer": "default",
    "callbacks": "default",
}
#: settings of the run next to its sections
SETTINGS: Mapping[str, Any] = {"seed": 0, "ckpt_path": None, "run_dir": None}
#: Trainer arguments, and where they are set instead
_ELSEWHERE = {"callbacks": "callbacks", "precision": "plan.precision", "strategy": "strategy"}
#: Hydra's groups for what the command itself decides: where a run writes, and what logs
_RUN_GROUPS: dict[str, str | None] = {
    "hydra/output": None,
    "hydra/job_logging": "none",
    "hydra/hydra_logging": "none",
}
_STORED = "lightning_mp_train"
_NEEDED = {"model": "model=llama_tiny", "plan": "plan=bf16"}
#: how the processes that a run starts know its folder
RUN_DIR = "LIGHTNING_MP_RUN_DIR"


@dataclass(frozen=True, slots=True)
class Composed:
    """A config as plain, resolved values, where its keys were written, and the arguments that it comes from."""

    #: without the sections that have a fault
    config: dict[str, Any]
    places: Places
    file: Path | None
    arguments: list[str]
    #: those that a sweep chose
    swept: list[str]


@contextmanager
def composed(
    arguments: Sequence[str],
    command: str,
    faults: Faults,
    config_dirs: Sequence[Path] = (),
    *,
    multirun: bool = False,
    needed: Collection[str] = tuple(_NEEDED),
    **replaced: Any,
) -> Generator[list[Composed]]:
    """The configs that the arguments describe (one without a sweep), while the project's own modules can be imported.

    A choice of a group on the command line replaces a section that the file writes out. ``run_dir`` of each is set;
    ``replaced`` are sections to put in place of what was composed. Of a sweep the first run's faults are noted.

    Raises:
        PlanError: no such file, or arguments that Hydra cannot compose; with what was noted in ``faults`` before.
        MissingExtraError: Hydra is not installed.
    """
    try:
        from hydra import initialize_config_dir
    except ImportError as error:
        raise MissingExtraError("hydra-core", "hydra", "composing a config") from error

    if not arguments and command != "train":
        faults.add(f"{command} without a run", fix=f"write lightning-mp {command} run.yaml")
        faults.raise_if_any()
    path, overrides = _split(arguments)
    root = path or Path(str(files("lightning_mp.configs"))) / "train.yaml"
    # first: else this package's groups would hide the user's of the same name
    first = config_dirs[0] if path is None and config_dirs else root.parent
    experiment = next((text.partition("=")[2] for text in overrides if text.lstrip("+").startswith("experiment=")), "")
    name = _file_name(experiment or root.stem) if command == "train" else command
    default, places = Path(f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"), Places()
    with _importable(path):
        runs: list[tuple[DictConfig, Path, list[str], list[str]]] = []
        with _hydra_errors(faults, path):
            written = _mapping(root, faults)
            if path is not None:
                places.add(path)
            with initialize_config_dir(str(first.resolve()), job_name=root.stem, version_base="1.3"):
                for parsed, swept in _runs(overrides, multirun=multirun):
                    chosen = {one.key_or_group for one in parsed if not isinstance(one.value(), dict)}
                    given = [text for one in parsed for text in _hydra_arguments(one, written)]
                    whole = _compose(_primary_config(written, config_dirs, chosen), given)
                    home = _folder(whole, default)
                    runs.append((whole, home / _file_name(",".join(swept)) if swept else home, given, swept))
                    for one in parsed:
                        places[one.key_or_group] = "on the command line"
        noted = itertools.chain([faults], itertools.repeat(Faults()))
        resolved = (_resolved(whole, home, replaced, needed, next(noted)) for whole, home, *_ in runs)
        yield [Composed(config, places, path, *run[2:]) for config, run in zip(resolved, runs, strict=True)]


@contextmanager
def _hydra_errors(faults: Faults, path: Path | None) -> Generator[None]:
    """Turn what Hydra, OmegaConf or PyYAML raise into one fault, in their words."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError) as error:
        said = one_line(error.__cause__ if isinstance(error.__cause__, HydraException) else error)
        said = said.partition(" Config search path:")[0].replace(_STORED, path.name if path else "train.yaml")
        missing = re.search(r"Could not find '(\w+)/([^']*)' Available options in '\S+': (.*)", said)
        fix = "+key=value adds a key, and a value with commas, braces or spaces wants quotes"
        if missing is not None:
            group, option, known = missing.groups()
            other = "choose one of these, or check --config-dir"
            names = known.split()
            fix = precision_fix(option, (), names) if group == "plan" else did_you_mean(option, names, other)
        where = "" if path is None or path.name in said else f"{path.name}: "
        faults.add(f"the config does not compose: {where}{said}", fix=fix)
        faults.raise_if_any()


def _split(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The config file, wherever it stands, and the other arguments; a path may have ``=`` in it."""
    for index, text in enumerate(arguments):
        names_file = text.endswith((".yaml", ".yml")) and Path(text).is_file()
        if names_file or ("=" not in text and not text.startswith("~")):
            return Path(text), [*arguments[:index], *arguments[index + 1 :]]
    return None, list(arguments)


@contextmanager
def _importable(config: Path | None) -> Generator[None]:
    """Where a project's own modules are: the present folder, as for ``python -m``, and that of the config."""
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    if config is not None:
        sys.path.append(str(config.resolve().parent))
    try:
        yield
    finally:
        sys.path[:] = before


# ---------------------------------------------------------------------- the file, completed


def _primary_config(written: Mapping[str, Any], config_dirs: Sequence[Path], chosen: Collection[str]) -> dict[str, Any]:
    """What a file says, as the primary config that Hydra composes.

    ``chosen`` are groups that the command line chooses from: they replace sections that the file writes out.
    An entry of the defaults list that the command line changes has to be there, so one of ``null`` is.
    """
    body = dict(written)
    defaults = cast("list[Any]", body.pop("defaults", None) or [])
    plan, word = body.get("plan"), precision_word(body.get("plan"))
    if word is not None:
        body["plan"] = {"precision": word}
    elif isinstance(plan, str) and plan in PRESETS:  # as plan=a100 is
        del body["plan"]
        defaults = [{"plan": plan}, *(entry for entry in defaults if _entry(entry)[1] != "plan")]
    own = [entry for entry in defaults if not _entry(entry)[0]]
    named = {_entry(entry)[1] for entry in own}
    overrides = [entry for entry in defaults if _entry(entry)[0] and _entry(entry)[1] not in _RUN_GROUPS]
    overrides += [{f"override {name}": option} for name, option in _RUN_GROUPS.items() if name not in chosen]
    added = [{name: None if name in body else file} for name, file in SECTIONS.items() if name not in named]
    own += [*([] if "_self_" in own else ["_self_"]), *([] if "experiment" in named else [{"experiment": None}])]
    hydra: dict[str, Any] = dict(body.pop("hydra", None) or {})
    folders = [folder.resolve().as_uri() for folder in config_dirs]
    hydra["searchpath"] = list(
        dict.fromkeys([*(hydra.get("searchpath") or []), *folders, "pkg://lightning_mp.configs"])
    )
    body = {key: value for key, value in body.items() if key not in chosen or key not in SECTIONS}
    return {"defaults": [*added, *own, *overrides], "hydra": hydra, **SETTINGS, **body}


def _mapping(path: Path, faults: Faults) -> dict[str, Any]:
    from omegaconf import OmegaConf

    if not path.is_file():
        faults.add(f"config {str(path)!r}, which is no file", fix="check the path")
    else:
        body: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        if isinstance(body, dict):
            return cast("dict[str, Any]", body)
        faults.add(f"config {str(path)!r}, which is no mapping", fix="write 'plan:' in it")
    faults.raise_if_any()
    return {}


def _entry(entry: Any) -> tuple[bool, str]:
    """Whether an entry of a defaults list is an override, and the group it chooses from, or the config it names."""
    words = str(next(iter(cast("dict[str, Any]", entry)), "") if isinstance(entry, dict) else entry).split() or [""]
    return isinstance(entry, dict) and "override" in words[:-1], words[-1].lstrip("/")


# ---------------------------------------------------------------------- the arguments


def _runs(overrides: Sequence[str], *, multirun: bool) -> Iterator[tuple[list[Override], list[str]]]:
    """The arguments of each run, and which of them the sweep chose."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    parsed: list[Override] = parser.parse_overrides(list(overrides))
    sweeps = [one for one in parsed if multirun and one.is_sweep_override()]
    choices = [
        [f"{str(one.input_line).partition('=')[0]}={value}" for value in one.sweep_string_iterator()] for one in sweeps
    ]
    for chosen in itertools.product(*choices):
        yield [*(one for one in parsed if one not in sweeps), *parser.parse_overrides(list(chosen))], list(chosen)


def _hydra_arguments(override: Override, written: Mapping[str, Any]) -> list[str]:
    """As Hydra takes it: a plan by its precision, a strategy by its name in a Trainer, ``++`` where a key is new.

    Whether a class takes such a key is checked later. What is deeper in a model or in data, and no call in the file as
    ``written``, may be a dict of the user's, whose keys Hydra checks.
    """
    from lightning_mp.strategies.registry import LIGHTNINGS

    key, value, text = override.key_or_group, override.value(), str(override.input_line)
    section, _, name = key.partition(".")
    deep = "." in name and section in ("model", "data") and not isinstance(value, dict)
    deep = deep and not _names_target(written, key.split(".")[:-1])
    if section not in SECTIONS or not text.startswith(key) or override.is_sweep_override() or deep:
        return [text]  # with +, ++ or ~ of its own, or what Hydra refuses
    if name:  # a list cannot be merged into a mapping
        return [*([f"++{key}=null"] if isinstance(value, list) else []), f"++{text}"]
    word = precision_word(value) if key == "plan" and value not in PRESETS else None
    if word is not None:
        return ["~plan", f"++plan.precision={word}"]
    if value is None:
        return [f"~{key}"]
    if key == "strategy" and isinstance(value, str):
        known, also = LIGHTNINGS.get(value.lower(), (value.removeprefix("mp_"), {}))
        return [f"strategy={known}", *(f"++strategy.{keyword}={setting}" for keyword, setting in also.items())]
    if isinstance(value, (int, float)):
        text = f"{key}='{value}'"  # Hydra chooses from a group by text alone
    return [f"++{text}" if isinstance(value, dict) else text]


def _names_target(written: Any, path: Sequence[str]) -> bool:
    """Whether what ``written`` has at ``path`` is a call: a mapping with a ``_target_``."""
    for key in path:
        written = cast("Mapping[str, Any]", written).get(key) if isinstance(written, Mapping) else None
    return isinstance(written, Mapping) and "_target_" in written


def _compose(node: dict[str, Any], arguments: list[str]) -> DictConfig:
    from hydra import compose
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(_STORED, node)  # by which name Hydra finds it
    try:
        return compose(_STORED, arguments, return_hydra_config=True)
    finally:
        store.repo.pop(f"{_STORED}.yaml", None)


# ---------------------------------------------------------------------- where a run writes


@contextmanager
def _under_hydra(whole: DictConfig, folder: Path) -> Generator[None]:
    """``${hydra:…}`` resolves as in an application of Hydra's that writes to ``folder``."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import read_write

    with read_write(whole.hydra):
        whole.hydra.runtime.output_dir = str(folder.absolute())
    instance = HydraConfig.instance()
    before = instance.cfg
    instance.set_config(whole)
    try:
        yield
    finally:
        instance.cfg = before


def _folder(whole: DictConfig, default: Path) -> Path:
    """The folder that a run asks for, as ``run_dir`` or to Hydra; that of the run whose process this is."""
    from omegaconf import OmegaConf

    if RUN_DIR in os.environ:
        return Path(os.environ[RUN_DIR])
    folder = default
    for section, key in ((whole.hydra.run, "dir"), (whole, "run_dir")):
        with _under_hydra(whole, folder):
            given = None if OmegaConf.is_missing(section, key) else section.get(key)
        folder = Path(str(given or folder))
    return folder


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "=,.-_+" else "_" for letter in text)[:120]


# ---------------------------------------------------------------------- checked before anything is built


def _resolved(
    whole: DictConfig, folder: Path, replaced: Mapping[str, Any], needed: Collection[str], faults: Faults
) -> dict[str, Any]:
    """The config as plain values; sections in which something was noted are left out.

    Noted are sections of ``needed`` that are missing, values that are missing or do not resolve (in OmegaConf's words),
    ``_target_`` that name nothing, and keys that what they name does not take. The plan is checked where it is built.
    """
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    config, found = whole.copy(), dict[str, Any]()
    with open_dict(config):
        config.update({**replaced, "run_dir": str(folder)})
        del config["hydra"]
    for name in (name for name in needed if not config.get(name)):
        faults.add(f"no {name}", fix=f"write a section {name!r}, or choose one of the group: {_NEEDED[name]}")
    for name in map(str, config):
        before = len(faults.found)
        if name == "strategy" and not config.get("plan") and is_ours(config[name]):
            continue  # it refers to the plan
        try:
            with _under_hydra(whole, folder):
                value = config[name]
                if OmegaConf.is_config(value):
                    value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            key = error.full_key or name
            faults.add(f"{key}: {str(error).splitlines()[0]}", fix=f"give it a value: {key}=...")
            continue
        for given, path in _targets(value, name):
            _check_target(given, path, faults)
        if len(faults.found) == before:
            found[name] = value
    trainer, planned = found.get("trainer") or {}, bool(config.get("plan"))
    if isinstance(trainer, dict):
        _check_trainer(cast("dict[str, Any]", trainer), planned, faults)
    else:
        faults.add(f"trainer={trainer!r} is no mapping", fix="write its arguments below it, as in max_steps: 100")
        del found["trainer"]
    return found


def _check_trainer(given: Mapping[str, Any], planned: bool, faults: Faults) -> None:
    from lightning_mp.strategies.registry import trainer_arguments

    for key in (key for key in given if not key.startswith("_")):
        if key in _ELSEWHERE and planned:
            faults.add(f"trainer.{key} next to a plan", fix=f"set {_ELSEWHERE[key]} instead")
        elif key not in trainer_arguments():
            fix = did_you_mean(key, trainer_arguments(), "remove it")
            faults.add(f"trainer.{key}, which Lightning's Trainer does not take", fix=fix)


def is_ours(strategy: Any) -> bool:
    """Whether a strategy section is one of make_strategy's, by name or by its keywords."""
    target = cast("Mapping[str, Any]", strategy).get("_target_") if isinstance(strategy, Mapping) else None
    return target is None or str(target).rpartition(".")[2] == "make_strategy"


def _targets(value: Any, path: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """What names a ``_target_`` in ``value``, with its key."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, dict) and isinstance(value.get("_target_"), str):
        yield value, path
    for key, item in items:
        if (path, key) != ("strategy", "plan"):  # which is this very run's
            yield from _targets(item, f"{path}.{key}")


def _check_target(given: Mapping[str, Any], path: str, faults: Faults) -> None:
    target = str(given["_target_"])
    if not callable(_located(target)):
        faults.add(
            f"{path}._target_: {target} names no class or function", fix="check that package.module.Name imports"
        )
        return
    takes = signature_of(target)
    if takes is None or path.startswith(("plan", "trainer")):  # what these take is checked elsewhere
        return
    keys = {key: None for key in given if not key.startswith("_")}
    try:
        takes.bind_partial(**keys)
        if not given.get("_partial_") and not given.get("_args_"):
            takes.bind(**keys)
    except TypeError as error:
        faults.add(f"{path}: {error}", fix=f"{target} takes {', '.join(takes.parameters)}")


def signature_of(target: str) -> inspect.Signature | None:
    """What the class or function of that name takes; ``None`` where it does not say."""
    try:
        return inspect.signature(_located(target))
    except (TypeError, ValueError):
        return None


def _located(target: str) -> Any:
    """What a ``_target_`` names, or ``None``; what the user's own module raises on import is raised."""
    try:
        return pydoc.locate(target)
    except pydoc.ErrorDuringImport as error:
        raise cast("Exception", error.value) from None
