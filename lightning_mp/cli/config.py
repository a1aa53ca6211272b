"""Compose and check one config from ``[CONFIG] key=value …``, by Hydra and this package's groups."""

from __future__ import annotations

import difflib
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
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, cast, get_args, get_origin, get_type_hints

from lightning_mp.cli.words import OPTION, Composer, let_words_win, typed_paths
from lightning_mp.errors import Faults, MissingExtraError, PlanError, did_you_mean, one_line
from lightning_mp.policy import precision_word
from lightning_mp.policy.load import HYDRA_KEYS, Places
from lightning_mp.policy.precision_policy import precision_fix

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

#: the folder of the package's groups, and the name of the config that chooses from each
GROUPS, ROOT = Path(str(files("lightning_mp.configs"))), "lightning_mp"
_PRIMARY = "lightning_mp_command"
#: sections that a file or the command line must give, each with an example
_REQUIRED = {"plan": "plan=bf16", "model": "model=llama_tiny", "data": "data=library_text"}
_SECTIONS = (*_REQUIRED, "strategy", "trainer", "callbacks")
#: new keys that may be set without a ``+``, because their names are checked later
_TAKEN = re.compile(r"(plan|strategy|trainer|callbacks)\.|(model|data)\.[^.]+$|(seed|ckpt_path|run_dir)$")
#: overrides of Hydra's own section: the command has its own logging and its own folder for a run
_HYDRAS_PART = ("~hydra/output", "hydra/job_logging=none", "hydra/hydra_logging=none")
#: the environment variable with the run's folder, for processes that the run starts
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
    """Yield the config that the arguments describe, and the places in which its keys were written.

    The values are plain and resolved. Sections with a fault are left out, and the faults are added.
    ``run_dir`` is always set. ``needed`` are sections whose absence is a fault, ``replaced`` are
    sections that replace the composed ones. Within, modules in the present folder and in the
    config's folder can be imported.

    Raises:
        PlanError: there are no arguments (except for ``train``), or the config file is missing, no
            mapping, or does not compose. Faults that were added before are reported too.
        MissingExtraError: Hydra is not installed.
    """
    if not arguments and command != "train":
        faults.add(f"{command} without a run", fix=f"write lightning-mp {command} run.yaml")
        faults.raise_if_any()
    path, overrides = _split(arguments)
    experiment = next((text.partition("=")[2] for text in overrides if text.startswith("experiment=")), "train")
    stem, places = experiment if path is None else path.stem, Places()
    home = f"runs/{file_name(stem if command == 'train' else command)}-{time.strftime('%Y%m%d-%H%M%S')}"
    # the user's folders come first: this package's groups must not hide groups of the same name
    folders = [*([] if path is None else [path.parent]), *config_dirs, GROUPS]
    before = list(sys.path)
    # a project's own modules: in the present folder, as for python -m, and beside the config
    sys.path[:] = [str(Path.cwd()), *before, *([] if path is None else [str(path.resolve().parent)])]
    try:
        with _hydra(folders[0], stem, faults, path):
            written = None if path is None else _mapping(path, places, faults)
            misspelt = {} if path is None or written is None else _misspelt(path, written, places, faults)
            needed = [name for name in needed if name not in misspelt.values()]
            parsed = _parsed(overrides)
            places.update((each.key_or_group, "on the command line") for each in parsed)
            whole = _composed(stem, written, parsed, folders, places, faults)
            whole["run_dir"] = _told_hydra(whole, os.environ.get(RUN_DIR) or home)
            whole.update(replaced)
            config = _values(whole, needed, faults)
        _check(config, faults)
        yield config, places  # outside of Hydra: within it, Lightning starts processes differently
    finally:
        sys.path[:] = before


def sweep(arguments: Sequence[str], faults: Faults) -> tuple[list[str], list[list[str]]]:
    """Return the arguments that all runs of a sweep share, and the overrides of each run.

    Each run has one combination of the swept values.

    Raises:
        PlanError: an override cannot be parsed.
        MissingExtraError: Hydra is not installed.
    """
    path, overrides = _split(arguments)
    with _hydra(GROUPS, "sweep", faults, path):
        swept = [each for each in _parsed(overrides) if each.is_sweep_override()]
        choices = [
            [f"{str(each.input_line).partition('=')[0]}={value}" for value in each.sweep_string_iterator()]
            for each in swept
        ]
    lines = [each.input_line for each in swept]
    return [text for text in arguments if text not in lines], [list(chosen) for chosen in itertools.product(*choices)]


def _split(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the config file, or ``None``, and the other arguments.

    The file is the first argument that is an existing YAML file or no override. A path may have
    ``=`` in it if the file exists.
    """
    for index, text in enumerate(arguments):
        names_file = text.endswith((".yaml", ".yml")) and Path(text).is_file()
        if names_file or ("=" not in text and not text.startswith("~")):
            return Path(text), [*arguments[:index], *arguments[index + 1 :]]
    return None, list(arguments)


def file_name(text: str) -> str:
    """Return the first 120 characters of ``text``, with ``_`` for characters unfit for a file's name."""
    return re.sub(r"[^\w=,.+-]", "_", text)[:120]


@contextmanager
def _hydra(folder: Path, name: str, faults: Faults, path: Path | None) -> Generator[None]:
    """Initialize Hydra's compose API on ``folder``, and restore Hydra's state at the end.

    ``path`` is the user's config file, for the message.

    Raises:
        PlanError: composing failed within. Hydra's message is one fault.
        MissingExtraError: Hydra is not installed.
    """
    try:
        from hydra import initialize_config_dir
        from hydra.core.config_store import ConfigStore
        from hydra.core.hydra_config import HydraConfig
        from hydra.errors import HydraException, MissingConfigException
    except ImportError as error:
        raise MissingExtraError("hydra-core", "hydra", "composing a config") from error
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    state = HydraConfig.instance()
    cfg = state.cfg
    try:
        with initialize_config_dir(str(folder.resolve()), name, version_base="1.3"):
            yield
    except PlanError:
        raise
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
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
    finally:
        state.cfg = cfg
        for key in (f"{_PRIMARY}.yaml", f"{OPTION}.yaml", "plan", "strategy"):
            ConfigStore.instance().repo.pop(key, None)


# ---------------------------------------------------------------------- composed


def _mapping(path: Path, places: Places, faults: Faults) -> dict[str, Any]:
    """Return the content of a YAML file, interpolations unresolved, and add its keys to ``places``.

    Raises:
        PlanError: there is no such file, or it is no mapping.
    """
    from omegaconf import OmegaConf

    body: Any = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else None
    if isinstance(body, dict):
        places.add(path)
        return cast("dict[str, Any]", body)
    wrong, fix = ("mapping", "write 'plan:' in it") if path.is_file() else ("file", "check the path")
    faults.add(f"config {str(path)!r}, which is no {wrong}", fix=fix)
    return faults.unwrap(None)


def _misspelt(path: Path, written: dict[str, Any], places: Places, faults: Faults) -> dict[str, str]:
    """Add a fault for each key that looks like a misspelt section, and return the sections' names by key.

    Only names that the file lacks count. A key to which the file refers, as in ``${plans.large}``,
    is the user's own. A file with a defaults list is not checked, because its sections may come
    from elsewhere.
    """
    if "defaults" in written:
        return {}
    known = [*_SECTIONS, "seed", "ckpt_path", "run_dir"]
    missing, text = [name for name in known if name not in written], path.read_text(encoding="utf-8")
    near: dict[str, str] = {}
    for key in [key for key in map(str, written) if key not in known and f"${{{key}" not in text]:
        for name in difflib.get_close_matches(key.lower(), missing, n=1, cutoff=0.8):
            near[key] = name
            faults.add(f"unknown key {key}{places.of(key)}", fix=f"did you mean {name!r}?")
    return near


def _parsed(overrides: Sequence[str]) -> list[Override]:
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(list(overrides))


def _composed(
    stem: str,
    written: dict[str, Any] | None,
    parsed: Sequence[Override],
    folders: Sequence[Path],
    places: Places,
    faults: Faults,
) -> DictConfig:
    """Return the whole config, with Hydra's own section.

    ``written`` is the content of the config file, or ``None`` without one. Hydra composes a file
    with a defaults list as it is. The sections of another file replace the sections of the
    package's config. A whole section on the command line replaces both.

    Raises:
        ValueError: ``experiment=`` stands next to a file without a defaults list.
        HydraException: Hydra cannot compose the config.
    """
    from hydra.core.config_store import ConfigStore
    from hydra.core.override_parser.types import OverrideType
    from omegaconf import OmegaConf

    body, store, sections = dict(written or {}), ConfigStore.instance(), dict[str, Any]()
    searchpath = OmegaConf.select(OmegaConf.create(body), "hydra.searchpath") or []
    searchpath += [f"file://{folder.resolve()}" for folder in folders[1:]]
    hydras_part = [*_HYDRAS_PART, f"hydra.searchpath={json.dumps(list(searchpath))}"]
    plain = "defaults" not in body
    if plain and written is not None:
        sections = {key: body.pop(key, None) for key in _SECTIONS if key in body or key in _REQUIRED}
    #: the key of each override, and the override as Hydra gets it
    lines: list[tuple[str, str]] = []
    for override in parsed:
        key, line = override.key_or_group, str(override.input_line)
        changes = override.type is OverrideType.CHANGE and not override.is_sweep_override()
        if changes and key in _SECTIONS and (plain or not isinstance(override.value(), (dict, list))):
            sections[key] = override.value()
        elif key == "experiment" and plain and written is not None:
            raise ValueError(f"{line}: next to a file, it goes into the file's own defaults list")
        else:
            lines.append((key, f"++{line}" if changes and _TAKEN.match(key) else line))
    for key, value in sections.items():
        word = isinstance(value, str)
        known = (key == "strategy" and word) or (key == "plan" and precision_word(value) is not None)
        if known and not any((folder / key / f"{value}.yaml").is_file() for folder in folders):
            store.store(str(value), {"precision" if key == "plan" else "name": value}, group=key)
            word = True
        lines.append((key, f"{key}='{value}'" if word else f"~{key}"))
        body |= {} if word else {key: value}
    if plain:
        store.store(_PRIMARY, {"defaults": [f"/{ROOT}", "_self_"], **body})

    composer = Composer(_PRIMARY if plain else stem, hydras_part, lines)
    whole = composer.whole()
    if not plain or any(key == "experiment" for key, _ in lines):
        words = [each for each in parsed if each.key_or_group in _SECTIONS and each.package is None]
        typed = typed_paths(each for each in parsed if each not in words)
        let_words_win(whole, words, typed, composer, places, faults)
    return whole


def _told_hydra(whole: DictConfig, home: str) -> str:
    """Return the run's folder, and pass it to Hydra, so that ``${hydra:…}`` resolves.

    It is ``run_dir`` if set, else ``hydra.run.dir``, else ``home``. In a process that a run started
    it is always ``home``.
    """
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf, read_write

    for key in ("", "hydra.run.dir", "run_dir"):
        home = str((key and RUN_DIR not in os.environ and OmegaConf.select(whole, key)) or home)
        with read_write(whole.hydra):
            whole.hydra.runtime.output_dir = str(Path(home).absolute())
        HydraConfig.instance().set_config(whole)
    return home


def _values(whole: DictConfig, needed: Collection[str], faults: Faults) -> dict[str, Any]:
    """Return the sections as plain values.

    A fault is added for each ``needed`` section that is missing. A section with a missing value, or
    an interpolation that does not resolve, is left out, and a fault is added too.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    strategy: Any = OmegaConf.select(whole, "strategy")
    if OmegaConf.is_dict(strategy) and str(strategy.get("_target_")).endswith("make_strategy"):
        for key in ("plan", *HYDRA_KEYS):  # left over: a section of its keywords
            strategy.pop(key, None)
    for name in (name for name in needed if not whole.get(name)):
        faults.add(f"no {name}", fix=f"write a section {name!r}, or choose one of the group: {_REQUIRED[name]}")
    config: dict[str, Any] = {}
    for name in map(str, whole):
        if name == "hydra":
            continue
        try:
            value = whole[name]
            plain = OmegaConf.is_config(value)
            config[name] = OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if plain else value
        except OmegaConfBaseException as error:
            key = error.full_key or name
            faults.add(f"{key}: {str(error).splitlines()[0]}", fix=f"give it a value: {key}=...")
    return config


# ---------------------------------------------------------------------- checks before building


def _check(config: dict[str, Any], faults: Faults) -> None:
    """Add a fault for each target that does not exist and each argument it does not take.

    Sections with a fault are removed from ``config``. The plan's arguments are checked later, when
    the plan is built.
    """
    for name, value in list(config.items()):
        before = len(faults.found)
        if name != "trainer":
            _check_calls(value, name, faults)
        elif not isinstance(value, dict):
            faults.add(f"trainer={value!r} is no mapping", fix="write its arguments below it, as in max_steps: 100")
        else:
            _check_calls({"_target_": "lightning_mp.compat.lightning.Trainer", **value}, name, faults)
            for key in ("callbacks", "precision", "strategy") if config.get("plan") else ():
                if key in value:
                    where = "plan.precision" if key == "precision" else key
                    faults.add(f"trainer.{key} next to a plan", fix=f"set {where} instead")
        if len(faults.found) > before:
            del config[name]


def _check_calls(value: Any, path: str, faults: Faults) -> None:
    """Add a fault for each ``_target_`` in ``value`` that does not exist or take its arguments.

    ``path`` is the dotted key of ``value``. The plan's arguments are not checked here.
    """
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _check_calls(item, f"{path}.{key}", faults)
    if not isinstance(value, dict) or "_target_" not in value:
        return
    target = str(value["_target_"])
    if not callable(_located(target)):
        fix = "check that package.module.Name imports"
        faults.add(f"{path}._target_: {target} names no class or function", fix=fix)
    elif not path.startswith("plan"):
        takes, given = signature_of(target), {key: each for key, each in value.items() if not key.startswith("_")}
        any_key = any(each.kind is each.VAR_KEYWORD for each in takes.parameters.values())
        unknown = [] if any_key else [key for key in given if key not in takes.parameters]
        _check_numbers(given, path, target, faults)
        for key in unknown:
            fix = did_you_mean(key, takes.parameters, "remove it")
            faults.add(f"{path}.{key}, which {target.rpartition('.')[2]} does not take", fix=fix)
        try:
            _ = unknown or value.get("_partial_") or value.get("_args_") or takes.bind(**given)
        except TypeError as error:
            faults.add(f"{path}: {error}", fix=f"{target} takes {', '.join(takes.parameters)}")


def _check_numbers(given: dict[str, Any], path: str, target: str, faults: Faults) -> None:
    """Add a fault for each value of ``given`` that is no number, if the target's type hint requires one.

    Only targets of Lightning and of this package are checked.
    """
    if target.partition(".")[0] not in ("lightning", "pytorch_lightning", "lightning_mp"):
        return
    located = _located(target)
    try:
        hints = get_type_hints(located.__init__ if inspect.isclass(located) else located)
    except (NameError, TypeError):  # a hint that is imported only for type checkers
        return
    for key, value in given.items():
        hint: Any = hints.get(key)
        kinds: set[Any] = set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint}
        if not kinds <= {int, float, bool, type(None)} or kinds <= {type(None)}:
            continue
        if not isinstance(value, (int, float)) and not (value is None and type(None) in kinds):
            words = {bool: "true", int: "a whole number", float: "a number"}
            allowed = " or ".join([words[kind] for kind in words if kind in kinds] + ["null"] * (type(None) in kinds))
            faults.add(f"{path}.{key}={value!r}", allowed=allowed, fix=f"write a number, as in {path}.{key}=1")


def signature_of(target: str) -> inspect.Signature:
    """Return the signature of the class or function ``target``.

    If it has none, or does not exist, return a signature that takes any arguments.
    """
    try:
        return inspect.signature(_located(target))
    except (TypeError, ValueError):
        return inspect.signature(lambda *_, **__: None)


def _located(target: str) -> Any:
    """Return the class or function called ``target``, or ``None`` if it does not exist.

    An exception that the user's module raises on import is raised.
    """
    try:
        return pydoc.locate(target)
    except pydoc.ErrorDuringImport as error:
        raise cast("Exception", error.value) from None
