"""From ``[CONFIG] key=value …`` to one config: Hydra composes the user's file with this package's groups."""

from __future__ import annotations

import inspect
import itertools
import os
import pydoc
import re
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning_mp.errors import Faults, MissingExtraError, PlanError, did_you_mean
from lightning_mp.policy import precision_word
from lightning_mp.policy.load import HYDRA_KEYS, Places
from lightning_mp.policy.presets import PRESETS
from lightning_mp.policy.words import precision_fix

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
#: Trainer arguments that have a section of their own
ELSEWHERE = {
    "callbacks": "write it in the callbacks section",
    "precision": "set plan.precision instead",
    "strategy": "write it in the strategy section",
}
#: Hydra's groups for what this command does itself: where a run writes, and what logs
_OURS: Mapping[str, str | None] = {"hydra/output": None, "hydra/job_logging": "none", "hydra/hydra_logging": "none"}
_SEARCHPATH = "pkg://lightning_mp.configs"
_STORED = "lightning_mp_train"
_NEEDED = {
    "model": "write 'model:' and below it '_target_: package.Class', or choose one of the group: model=llama_tiny",
    "plan": "write 'plan:' and below it 'precision: bf16-mixed', or choose one of the group: plan=bf16",
}
#: how the processes that a run starts know its folder
RUN_DIR = "LIGHTNING_MP_RUN_DIR"


@dataclass(frozen=True, slots=True)
class Composed:
    """A config, where its keys were written, its arguments, and those of them that a sweep chose."""

    config: DictConfig
    #: the same, with the section in which Hydra keeps what is its own
    whole: DictConfig
    places: Places
    file: Path | None
    arguments: tuple[str, ...]
    swept: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The experiment's, or the file's."""
        chosen = [text.partition("=")[2] for text in self.arguments if text.lstrip("+").startswith("experiment=")]
        return chosen[-1].replace("/", "_") if chosen else "train" if self.file is None else self.file.stem

    @contextmanager
    def under_hydra(self, folder: Path) -> Generator[None]:
        """``${hydra:…}`` resolves as in an application of Hydra's that writes to ``folder``."""
        from hydra.core.hydra_config import HydraConfig
        from omegaconf import read_write

        with read_write(self.whole.hydra):
            self.whole.hydra.runtime.output_dir = str(folder.absolute())
        instance = HydraConfig.instance()
        before = instance.cfg
        instance.set_config(self.whole)
        try:
            yield
        finally:
            instance.cfg = before


@contextmanager
def composed(
    arguments: Sequence[str], command: str, faults: Faults, config_dirs: Sequence[Path] = (), *, multirun: bool = False
) -> Generator[list[Composed]]:
    """The configs that the arguments describe (one without a sweep), while the project's own modules can be imported.

    A choice of a group on the command line replaces a section that the file writes out. ``run_dir`` of each is set.

    Raises:
        PlanError: no such file, or arguments that Hydra cannot compose; with what was noted in ``faults`` before.
        MissingExtraError: Hydra is not installed.
    """
    try:
        from hydra import initialize_config_dir
    except ImportError as error:
        raise MissingExtraError("hydra-core", "hydra", "composing a config") from error
    from omegaconf import open_dict

    if not arguments and command != "train":
        faults.add(f"{command} without a run", "a YAML file, key=value", f"lightning-mp {command} run.yaml")
        faults.raise_if_any()
    path, overrides = _split(arguments)
    for folder in config_dirs:
        if not folder.is_dir():
            faults.add(f"--config-dir {str(folder)!r}, which is no folder", "a folder of groups", "check the path")
    with _importable(path):
        with _hydras_own(faults, path):
            folders = [folder.resolve().as_uri() for folder in config_dirs]
            root = path or Path(str(files("lightning_mp.configs"))) / "train.yaml"
            # this package's own folder would hide what the user's folders call alike
            first = config_dirs[0] if path is None and config_dirs else root.parent
            node = partial(_node, _mapping(root), folders)
            with initialize_config_dir(str(first.resolve()), job_name=root.stem, version_base="1.3"):
                jobs = [_compose(node, path, *job) for job in _jobs(overrides, multirun=multirun)]
        home = run_dir(jobs[0], command, faults)
        for job in jobs:
            with open_dict(job.config):
                job.config.run_dir = str(home / _file_name(",".join(job.swept)) if job.swept else home)
        yield jobs


@contextmanager
def _hydras_own(faults: Faults, path: Path | None) -> Generator[None]:
    """What Hydra, OmegaConf or PyYAML refuse is one fault, in their words."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except PlanError as error:
        faults.extend(error.faults)
        faults.raise_if_any()
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError) as error:
        said = " ".join(str(error.__cause__ if isinstance(error.__cause__, HydraException) else error).split())
        said = said.partition(" Config search path:")[0].replace(_STORED, path.name if path else "train.yaml")
        fix = "+key=value adds a key, and a value with commas, braces or spaces wants quotes"
        missing = re.search(r"Could not find '([^']*)/([^']*)' Available options in '\S+': (.*)", said)
        if missing is not None:
            group, option, known = missing.groups()
            near = precision_fix(option, (), known.split()) if group == "plan" else did_you_mean(option, known.split())
            fix = near if "mean" in near else "choose one of these, or check --config-dir"
        where = "" if path is None or path.name in said else f"{path.name}: "
        faults.add(f"a config that does not compose: {where}{said}", "what Hydra composes", fix)
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


def _node(written: Mapping[str, Any], folders: Sequence[str], chosen: Collection[str]) -> dict[str, Any]:
    """What a file says as Hydra composes it.

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
        defaults = [{"plan": plan}, *(entry for entry in defaults if _group(entry) != "plan")]
    overrides = [entry for entry in defaults if _is_override(entry) and _group(entry) not in _OURS]
    overrides += [{f"override {name}": option} for name, option in _OURS.items() if name not in chosen]
    own = [entry for entry in defaults if not _is_override(entry)]
    named = {_group(entry) for entry in own}
    added = [{name: None if name in body else file} for name, file in SECTIONS.items() if name not in named]
    own += [*([] if "_self_" in own else ["_self_"]), *([] if "experiment" in named else [{"experiment": None}])]
    hydra: dict[str, Any] = dict(body.pop("hydra", None) or {})
    hydra["searchpath"] = list(dict.fromkeys([*(hydra.get("searchpath") or []), *folders, _SEARCHPATH]))
    body = {key: value for key, value in body.items() if key not in chosen or key not in SECTIONS}
    return {"defaults": [*added, *own, *overrides], "hydra": hydra, **SETTINGS, **body}


def _mapping(path: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf

    with Faults() as faults:
        body: Any = None
        if not path.is_file():
            faults.add(f"config {str(path)!r}, which is no file", "a YAML file", "check the path")
        elif not isinstance(body := OmegaConf.to_container(OmegaConf.load(path), resolve=False), dict):
            faults.add(f"config {str(path)!r}, a {type(body).__name__}", "a YAML mapping", "write 'plan:' in it")
    return cast("dict[str, Any]", body)


def _is_override(entry: Any) -> bool:
    return isinstance(entry, dict) and "override" in str(next(iter(cast("dict[str, Any]", entry)), "")).split()[:-1]


def _group(entry: Any) -> str:
    """The group an entry of a defaults list chooses from, or the config it names."""
    name = str(next(iter(cast("dict[str, Any]", entry)), "")) if isinstance(entry, dict) else str(entry)
    return (name.split() or [""])[-1].lstrip("/")


# ---------------------------------------------------------------------- the arguments


def _jobs(overrides: Sequence[str], *, multirun: bool) -> Iterator[tuple[list[Override], list[str]]]:
    """The arguments of each run, and which of them the sweep chose."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    parsed: list[Override] = parser.parse_overrides(list(overrides))
    sweeps = [override for override in parsed if override.is_sweep_override()]
    with Faults() as faults:
        for override in [] if multirun else sweeps:
            fix = f"add -m to run each, or write a list: {override.key_or_group}=[{override.get_value_string()}]"
            faults.add(f"several values, {override.input_line!r}, for one run", "one value", fix)
    fixed = [override for override in parsed if not override.is_sweep_override()]
    keys = (str(sweep.input_line).partition("=")[0] for sweep in sweeps)
    choices = [
        [f"{key}={value}" for value in sweep.sweep_string_iterator()] for key, sweep in zip(keys, sweeps, strict=True)
    ]
    for chosen in itertools.product(*choices):
        yield [*fixed, *parser.parse_overrides(list(chosen))], list(chosen)


def _compose(
    node: Callable[[set[str]], dict[str, Any]], path: Path | None, overrides: list[Override], swept: list[str]
) -> Composed:
    """One config; ``key=value`` for what the target of its section may take is Hydra's ``++key=value``."""
    from hydra import compose
    from hydra.core.config_store import ConfigStore
    from omegaconf import open_dict

    values = [one for one in overrides if one.key_or_group.partition(".")[0] in SECTIONS and "." in one.key_or_group]
    rest = [one for one in overrides if one not in values]
    chosen = {one.key_or_group for one in rest if not isinstance(one.value(), dict)}
    given = [text for one in rest for text in _choice(one)]
    store = ConfigStore.instance()
    store.store(_STORED, node(chosen))  # by which name Hydra finds it
    try:
        base = compose(_STORED, given, return_hydra_config=True)
        given += [text for one in values for text in _change(base, one)]
        whole = compose(_STORED, given, return_hydra_config=True) if values else base
    finally:
        store.repo.pop(f"{_STORED}.yaml", None)
    places = Places()
    if path is not None:
        places.add(path)
    for override in overrides:
        places[override.key_or_group] = "on the command line"
    config = whole.copy()
    with open_dict(config):
        del config["hydra"]
    return Composed(config, whole, places, path, tuple(given), tuple(swept))


def _choice(override: Override) -> list[str]:
    """A choice from a group as Hydra takes it: a plan by its precision, a strategy by its name in a Trainer."""
    from lightning_mp.strategies.registry import LIGHTNINGS

    key, value, text = override.key_or_group, override.value(), str(override.input_line)
    word = precision_word(value) if key == "plan" and value not in PRESETS else None
    if word is not None:
        return ["~plan", f"++plan.precision={word}"]
    if key in SECTIONS and value is None and text.startswith(key):
        return [f"~{key}"]
    if key == "strategy" and isinstance(value, str):
        name, also = LIGHTNINGS.get(value.lower(), (value.removeprefix("mp_"), {}))
        return [f"strategy={name}", *(f"++strategy.{keyword}={setting}" for keyword, setting in also.items())]
    if key in SECTIONS and isinstance(value, (int, float)) and text.startswith(key):
        return [f"{key}='{value}'"]  # Hydra chooses by text alone
    return [f"++{text}"] if key in SECTIONS and isinstance(value, dict) and text.startswith(key) else [text]


def _change(base: DictConfig, override: Override) -> list[str]:
    """The argument as Hydra wants it: with ``++`` where its key is not there yet, but may be."""
    from omegaconf import OmegaConf

    text, key, value = str(override.input_line), override.key_or_group, override.value()
    if not text.startswith(key):
        return [text]  # with +, ++ or ~ of its own
    parent = key.rpartition(".")[0]
    holds, there = (OmegaConf.select(base, path, throw_on_resolution_failure=False) for path in (parent, key))
    if isinstance(value, list) and OmegaConf.is_dict(there):
        return [f"~{key}", f"+{text}"]  # a list cannot be merged into a mapping
    takes = OmegaConf.is_dict(holds) and ("_target_" in holds or parent in ("trainer", "strategy"))
    return [f"++{text}" if takes or key.startswith("plan.") or isinstance(value, dict) else text]


# ---------------------------------------------------------------------- where a run writes


def run_dir(job: Composed, command: str, faults: Faults) -> Path:
    """The folder that ``job`` asks for, as ``run_dir`` or to Hydra; else a new one below ``runs/``."""
    from omegaconf import OmegaConf

    inherited, hydra = os.environ.get(RUN_DIR), job.whole.hydra
    name = job.name if command == "train" else command
    folder = Path(inherited or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    asked = [] if inherited else [(hydra["sweep" if job.swept else "run"], "dir")]
    with _hydras_own(faults, job.file):
        for section, key in (*asked, (job.config, "run_dir")):
            with job.under_hydra(folder):
                given = None if OmegaConf.is_missing(section, key) else section.get(key)
                folder = folder if given is None else Path(str(given))
    return folder


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "=,.-_+" else "_" for letter in text)[:120]


# ---------------------------------------------------------------------- checked before anything is built


def checked(
    job: Composed, faults: Faults, *, needed: Collection[str] = tuple(_NEEDED), only: Collection[str] | None = None
) -> dict[str, Any]:
    """The config as plain, resolved values; sections in which something was noted are left out.

    Noted are sections of ``needed`` that are missing, values that are missing or do not resolve (in OmegaConf's words),
    ``_target_`` that name nothing, and keys that what they name does not take. The plan is looked at where it is built.
    With ``only``, other sections are neither looked at nor given back.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    missing = [name for name in needed if not job.config.get(name)]
    for name in missing:
        faults.add(f"no {name}", f"a {name} section", _NEEDED[name])
    found: dict[str, Any] = {}
    # the package's strategies refer to the plan
    left = {"strategy"} if "plan" in missing else set[str]()
    for name in (str(name) for name in job.config if (only is None or name in only) and name not in left):
        before = len(faults.found)
        try:
            with job.under_hydra(Path(str(job.config.get("run_dir")))):
                value = job.config[name]
                if OmegaConf.is_config(value):
                    value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            key, said = error.full_key or name, str(error).partition("\n")[0]
            faults.add(f"{key}: {said}", "a value that is there and resolves", f"give it one: {key}=...")
            continue
        for given, path in _targets(value, name):
            _check_target(given, path, faults)
        if len(faults.found) == before:
            found[name] = value
    _check_trainer(found.get("trainer"), faults, under_plan=bool(job.config.get("plan")))
    return found


def _targets(value: Any, path: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """What names a ``_target_`` in ``value``, with its key."""
    if isinstance(value, list):
        for index, item in enumerate(cast("list[Any]", value)):
            yield from _targets(item, f"{path}.{index}")
    elif isinstance(value, Mapping):
        given = cast("Mapping[str, Any]", value)
        if isinstance(given.get("_target_"), str):
            yield given, path
        for key, item in given.items():
            if (path, key) != ("strategy", "plan"):  # which is this very run's
                yield from _targets(item, f"{path}.{key}")


def _check_target(given: Mapping[str, Any], path: str, faults: Faults) -> None:
    target = located(given["_target_"])
    if not callable(target):
        fix = "write package.module.Name, and check that it imports"
        faults.add(
            f"{path}._target_: {given['_target_']}, which names no class or function", "a class or function", fix
        )
        return
    known = parameters(target)
    if known is None or path.partition(".")[0] in ("plan", "trainer"):
        return  # it takes anything; or what it takes is checked in full elsewhere
    names = [one.name for one in known]
    for key in (key for key in given if key not in (*HYDRA_KEYS, "_partial_", "_args_", *names)):
        allowed = ", ".join(names) or "no keys"
        faults.add(f"unknown key {path}.{key}", allowed, did_you_mean(key, names, "remove it"))
    if given.get("_partial_") or given.get("_args_"):
        return
    for name in (one.name for one in known if one.default is inspect.Parameter.empty and one.name not in given):
        faults.add(f"{path} without {name!r}", f"what {given['_target_']} needs", f"give it: {path}.{name}=...")


def located(target: str) -> Any:
    """What a ``_target_`` names, or ``None``.

    Raises:
        Exception: whatever the user's own module raises when it is imported.
    """
    try:
        return pydoc.locate(target)
    except pydoc.ErrorDuringImport as error:
        raise cast("Exception", error.value) from None


def parameters(target: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Its parameters that can be given by name; ``None`` where it takes any, or does not say."""
    try:
        found = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in found):
        return None
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter for parameter in found if parameter.kind in kinds]


def _check_trainer(given: Any, faults: Faults, *, under_plan: bool) -> None:
    from lightning_mp.strategies import registry

    if given is not None and not isinstance(given, Mapping):
        faults.add(f"trainer: {given!r}", "a mapping of Trainer arguments", "write 'max_steps: 100' below it")
        return
    known = [name for name in registry.trainer_arguments() if not under_plan or name not in ELSEWHERE]
    for key in (key for key in cast("Mapping[str, Any]", given or {}) if key not in known and key not in HYDRA_KEYS):
        fix = ELSEWHERE.get(key) or did_you_mean(key, known, "remove it")
        faults.add(f"trainer.{key}", "an argument of Lightning's Trainer", fix)
