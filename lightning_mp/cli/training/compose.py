"""From a file and ``key=value`` arguments to one config, every fault of the arguments found together."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning_mp.cli.training import primary, targets
from lightning_mp.errors import Faults, MissingExtraError, did_you_mean, one_line
from lightning_mp.policy import PRECISIONS, precision_word
from lightning_mp.policy.places import Places
from lightning_mp.policy.words import precision_fix

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

    from lightning_mp.cli.training.primary import Primary

SUBJECT = "train"
_ROOT = "lightning_mp_train"


@dataclass(frozen=True, slots=True)
class Composed:
    """A config, what made it different from its neighbours in a sweep, and where its keys were written."""

    config: DictConfig
    #: the same, with the section in which Hydra keeps what is its own
    whole: DictConfig
    places: Places
    #: the arguments, and those of them that the sweep chose
    arguments: tuple[str, ...] = ()
    swept: tuple[str, ...] = ()

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


@dataclass(frozen=True, slots=True)
class _Arguments:
    """The ``key=value`` arguments, sorted: choices from groups, changes of values, and Hydra's own forms."""

    groups: list[Override] = field(default_factory=list["Override"])
    changes: list[Override] = field(default_factory=list["Override"])
    others: list[Override] = field(default_factory=list["Override"])


def split(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The config file, if the first argument names one, and the rest."""
    first = arguments[0] if arguments else "="
    if "=" in first or first.startswith("~"):
        return None, list(arguments)
    return Path(first), list(arguments[1:])


def compose(
    path: Path | None,
    overrides: Sequence[str],
    faults: Faults,
    *,
    config_dirs: Sequence[Path] = (),
    multirun: bool = False,
) -> list[Composed]:
    """The configs that ``path`` (``None``: this package's root) and the arguments describe; one without a sweep.

    A value may be given for any key that is there, and for any argument that what stands there takes. A group's choice
    on the command line replaces a section that the file writes out. Arguments that cannot be used are noted in
    ``faults``; the configs are then what the others say.

    Raises:
        PlanError: no such file, or one whose own choices or keys Hydra cannot compose.
        MissingExtraError: Hydra is not installed.
    """
    _require_hydra()
    for folder in config_dirs:
        if not folder.is_dir():
            faults.add(f"--config-dir {str(folder)!r}, which is no folder", "a folder of groups", "check the path")
    parsed = _parse(overrides, faults)
    root = primary.read(primary.shipped_root() if path is None else path, config_dirs, faults)
    root = faults.sound(root) if root is None else root
    with _hydra(root, config_dirs if path is None else ()):
        jobs = _jobs(root, parsed, multirun, faults)
        good = [(_check_groups(_sort(job, root), root, faults), swept) for job, swept in jobs]
        _check_defaults(root, good[0][0], faults)
        return [_composed(root, arguments, swept, faults) for arguments, swept in good]


def _require_hydra() -> None:
    try:
        importlib.import_module("hydra")
    except ImportError as error:
        raise MissingExtraError("hydra-core", "hydra", "composing a config") from error


@contextmanager
def _hydra(root: Primary, first: Sequence[Path] = ()) -> Generator[None]:
    """Hydra, looking into ``first``, else into the folder of ``root``, first; what was there before is put back.

    Where ``root`` is this package's own, its folder would hide what the user's folders call alike.
    """
    from hydra import initialize_config_dir

    folder = next((folder.resolve() for folder in first if folder.is_dir()), root.path.parent)
    with initialize_config_dir(str(folder), job_name=root.path.stem, version_base="1.3"):
        yield


@contextmanager
def _stored(root: Primary, chosen: Sequence[str]) -> Generator[str]:
    """``root`` under a name by which Hydra finds it, while the context lasts."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(_ROOT, root.node(chosen))
    try:
        yield _ROOT
    finally:
        store.repo.pop(f"{_ROOT}.yaml", None)


# ---------------------------------------------------------------------- the arguments


def _parse_one(text: str) -> Override:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(text)


def _parse(overrides: Sequence[str], faults: Faults) -> list[Override]:
    parsed = [_parsed(text, faults) for text in overrides]
    return [override for override in parsed if override is not None]


def _parsed(text: str, faults: Faults) -> Override | None:
    from hydra.errors import HydraException

    try:
        return _parse_one(text)
    except HydraException as error:
        fix = "put quotes around the value" if "=" in text else f"write {text}=..."
        if text.lstrip("+").startswith("plan.pins"):
            fix = "write plan.pins=\"[{pattern:'*norm*',dtype:fp32}]\""
        faults.add(f"argument {text!r}: {one_line(error)}", "key=value, +key=value, ~key", fix)
    return None


def _jobs(
    root: Primary, parsed: list[Override], multirun: bool, faults: Faults
) -> list[tuple[list[Override], tuple[str, ...]]]:
    """The arguments of each run, and which of them the sweep chose."""
    fixed = [override for override in parsed if not override.is_sweep_override()]
    sweeps = [override for override in parsed if override.is_sweep_override()]
    if not multirun:
        for override in sweeps:
            fix = f"add -m to run each, or write a list: {override.key_or_group}=[{override.get_value_string()}]"
            faults.add(f"several values, {override.input_line!r}, for one run", "one value", fix)
        return [(fixed, ())]
    choices = [_choices(root, override, faults) for override in sweeps]
    chosen = itertools.product(*(choice for choice in choices if choice))
    return [([*fixed, *map(_parse_one, one)], one) for one in chosen]


def _choices(root: Primary, sweep: Override, faults: Faults) -> list[str]:
    """The arguments that a sweep stands for."""
    from hydra.core.override_parser.types import Glob
    from hydra.errors import HydraException

    key, value = str(sweep.input_line).partition("=")[0], sweep.value()
    if isinstance(value, Glob):
        options = _listed(root, sweep.key_or_group, "CONFIG")
        found = value.filter(options)
        if not found:
            faults.add(f"argument {sweep.input_line!r}, which matches nothing", ", ".join(options), "widen the pattern")
        return [f"{key}={name}" for name in found]
    try:
        return [f"{key}={text}" for text in sweep.sweep_string_iterator()]
    except HydraException as error:
        faults.add(f"argument {sweep.input_line!r}: {one_line(error)}", "values to run one after another", "list them")
    return []


def _sort(overrides: list[Override], root: Primary) -> _Arguments:
    found = _Arguments()
    for override in overrides:
        key, value = override.key_or_group.lstrip("/"), override.value()
        word = precision_word(value) if key == "plan" else None
        if word is not None and value not in _listed(root, key, "CONFIG"):
            found.groups.append(_removed(key))
            found.others.append(_parse_one(f"++plan.precision={word}"))
        elif key == "strategy" and isinstance(value, str) and value.startswith("mp_"):
            found.groups.append(_parse_one(f"strategy={value.removeprefix('mp_')}"))
        elif not isinstance(value, dict) and _is_group(root, key):
            found.groups.append(override if value is not None else _removed(key))
        elif override.is_add() or override.is_force_add() or override.is_delete() or key.startswith("hydra."):
            found.others.append(override)
        else:
            found.changes.append(override)
    return found


# ---------------------------------------------------------------------- groups


def _removed(group: str) -> Override:
    """What Hydra calls ``group=null``: no choice from that group."""
    return _parse_one(f"~{group}")


def _loader() -> Any:
    from hydra.core.global_hydra import GlobalHydra

    return GlobalHydra.instance().config_loader()


def _listed(root: Primary, group: str, kind: str) -> list[str]:
    from hydra.core.object_type import ObjectType

    with _stored(root, ()) as name:
        return cast("list[str]", _loader().get_group_options(group, ObjectType[kind], name, []))


def _is_group(root: Primary, name: str) -> bool:
    return "." not in name and any(_listed(root, name.partition("@")[0], kind) for kind in ("CONFIG", "GROUP"))


def _group_names(root: Primary) -> list[str]:
    """The groups at the top: every folder that holds a config."""
    return [name for name in _listed(root, "", "GROUP") if name != "hydra" and _listed(root, name, "CONFIG")]


def _check_option(root: Primary, group: str, option: object, where: str, faults: Faults) -> bool:
    options = _listed(root, group, "CONFIG")
    wanted = cast("list[object]", option) if isinstance(option, list) else [option]
    unknown = [
        one
        for one in wanted
        if not isinstance(one, str) or (one not in options and one.removesuffix(".yaml") not in options)
    ]
    for one in unknown:
        fix = precision_fix(one, (), options) if group == "plan" else did_you_mean(str(one), options)
        allowed = [*options, *PRECISIONS] if group == "plan" else options
        faults.add(f"{group}={one}{where}, which is no file of that group", ", ".join(dict.fromkeys(allowed)), fix)
    return not unknown


def _check_groups(arguments: _Arguments, root: Primary, faults: Faults) -> _Arguments:
    """The arguments without choices that do not exist, which are noted."""
    good = [
        override
        for override in arguments.groups
        if override.is_delete() or _check_option(root, override.key_or_group.lstrip("/"), override.value(), "", faults)
    ]
    return _Arguments(good, arguments.changes, arguments.others)


def _check_defaults(root: Primary, arguments: _Arguments, faults: Faults) -> None:
    """The choices that the file's own defaults list makes; Hydra would name the first bad one only, and no line."""
    places, before = Places(), len(faults.found)
    places.add(root.path)
    chosen = {override.key_or_group for override in arguments.groups}
    for group, option, optional in root.choices():
        where = places.of_text(root.path, group)
        plain = group.partition("@")[0]
        if plain.startswith("hydra/") or "${" in f"{plain}{option}" or group in chosen:
            continue
        if optional and option not in _listed(root, plain, "CONFIG"):
            continue
        if not _is_group(root, plain):
            if option is not None:
                groups, given = _group_names(root), f"defaults: {group}: {option}{where}, which is no group"
                faults.add(given, ", ".join(groups), did_you_mean(plain, groups))
        elif option is None:
            continue
        elif option == "???":
            options = ", ".join(_listed(root, plain, "CONFIG"))
            faults.add(f"defaults: {group}: ???{where}", options, f"choose one: {group}=...")
        else:
            _check_option(root, plain, option, where, faults)
    if len(faults.found) > before:  # there is nothing that could be composed
        faults.raise_if_any()


# ---------------------------------------------------------------------- values


def _composed(root: Primary, arguments: _Arguments, swept: tuple[str, ...], faults: Faults) -> Composed:
    from omegaconf import open_dict

    groups, lines = ([str(override.input_line) for override in some] for some in (arguments.groups, arguments.others))
    with _stored(root, [override.key_or_group for override in arguments.groups]) as name:
        if any(override.key_or_group.startswith("plan.") for override in (*arguments.changes, *arguments.others)):
            word = precision_word(_run(root, name, groups, faults).get("plan"))
            if word is not None:  # a field of the plan would take the place of the word
                lines.insert(0, f"++plan.precision={word}")
        lines = [*groups, *lines]
        config = _run(root, name, lines, faults)
        places = _places(root, config)
        changes = [text for override in arguments.changes for text in _change(config, override, faults)]
        if changes:
            config = _run(root, name, [*lines, *changes], faults)
    for override in (*arguments.changes, *arguments.others):
        places.add_key(override.key_or_group, "on the command line")
    whole = config.copy()
    with open_dict(config):
        del config["hydra"]
    return Composed(config, whole, places, (*lines, *changes), swept)


def _run(root: Primary, name: str, overrides: list[str], faults: Faults) -> DictConfig:
    from hydra import compose as hydra_compose
    from hydra.errors import HydraException

    try:
        return hydra_compose(name, overrides, return_hydra_config=True)
    except (HydraException, ValueError) as error:  # of PyYAML and OmegaConf, where Hydra does not wrap them
        cause = error.__cause__ or error
        said = (one_line(cause) or one_line(error)).replace(name, root.path.name)
        faults.add(f"a config that does not compose: {said}", "what Hydra composes", "fix what it names")
        faults.raise_if_any()
        raise


def _change(base: DictConfig, override: Override, faults: Faults) -> list[str]:
    """The argument as Hydra wants it: with ``++`` where its key is not there yet, but may be."""
    text, key, value = str(override.input_line), override.key_or_group, override.value()
    parent, last, known = targets.allowed_at(base, key)
    if not last:
        if isinstance(value, list) and isinstance(targets.walk(targets.plain(base), key)[2], dict):
            return [f"~{key}", f"+{text}"]  # a list cannot be merged into a mapping
        return [f"++{text}" if isinstance(value, dict) else text]
    if known is None or last in known or last in targets.HYDRA_KEYS:
        return [f"++{text}"]
    fix = did_you_mean(last, known, f"write +{text} to add it all the same")
    if not parent and last in targets.trainer_arguments():
        fix = f"did you mean 'trainer.{last}'?"
    if parent == "trainer":
        fix = targets.ELSEWHERE.get(last, fix)
    faults.add(f"argument {text!r}: no key {last!r} in {parent or 'the config'}", ", ".join(sorted(known)), fix)
    return []


def _places(root: Primary, config: DictConfig) -> Places:
    places = Places()
    choices = cast("dict[str, Any]", config.hydra.runtime.choices)
    sources = [
        f"{source.schema}://{source.path}"
        for source in config.hydra.runtime.config_sources
        if source.provider not in ("hydra", "schema")
    ]
    late = (primary.EXPERIMENT,)
    for group, option in sorted(choices.items(), key=lambda item: item[0] in late):
        if group in late:
            places.add(root.path)
        if isinstance(option, str) and not group.startswith("hydra/"):
            places.add_choice(sources, group, option)
    if not any(group in late for group in choices):
        places.add(root.path)
    return places
