"""Why jsonargparse refused: every fault, with near names and places, where it stops at the first."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from lightning_mp.cli.training import targets
from lightning_mp.cli.training.application import check_checkpoint
from lightning_mp.cli.training.lightning_cli.arguments import Arguments, Written
from lightning_mp.cli.training.lightning_cli.plan_section import CLASS
from lightning_mp.compat.lightning import Precision, callbacks
from lightning_mp.errors import Faults, did_you_mean, nearest
from lightning_mp.policy import precision_word
from lightning_mp.policy.places import Places

#: what jsonargparse raises while it parses: its own, and what its actions raise
REFUSALS = (ArgumentError, TypeError, ValueError, OSError)
#: keys that hold an object, or the name of its class
_OBJECTS = ("model", "data")
_REQUIRED = "the following arguments are required: "
#: lines of jsonargparse's messages that only list what was tried
_TRIED = re.compile(
    r"Does not validate|Subtypes:|Errors:|Given value|Expected a (path but|<class 'NoneType'>)|Not a valid subclass of"
    r"|Subclass types expect|a (class path|dict with)|Parser key|.*Namespace\("
)
_LONGEST = 500
_REFUSED = object()


def explain(parser: ArgumentParser, given: Arguments, error: Exception | None, faults: Faults) -> list[Written]:
    """Note every fault of what ``parser`` refused with ``error``; returns what of it stands.

    Keys and classes are looked at by themselves. Then the parser says what it refuses of the rest, without which it is
    asked again; without an ``error`` it is not asked.
    """
    before, known = len(faults.found), list(parser.get_defaults(skip_validation=True).keys())
    classes = _classes(given)
    found = [_checked(one, known, classes, given.places, faults) for one in given.written]
    good = [one for one in found if one is not None]
    while error is not None:
        try:
            parser.parse_args([word for one in good for word in one.words])
            break
        except yaml.YAMLError:
            break  # objects from Python, which no words can say
        except REFUSALS as refused:
            culprit = note(refused, given, good, faults)
            if culprit is None:
                break
            good.remove(culprit)
    if error is not None and len(faults.found) == before:
        note(error, Arguments(), (), faults)
    return good


# ---------------------------------------------------------------------- keys and classes


def _classes(given: Arguments) -> dict[str, str]:
    """The class that each key names."""
    found = dict[str, str]()
    for one in given.written:
        value: Any = one.value
        name = value.get(CLASS) if isinstance(value, Mapping) else value
        if isinstance(name, str):
            found[one.key.removesuffix(f".{CLASS}")] = name
    return found


def _checked(
    one: Written, known: Sequence[str], classes: Mapping[str, str], places: Places, faults: Faults
) -> Written | None:
    """Without what is refused here, which is noted; ``None`` where nothing is left."""
    if not one.key:
        word = str(one.value)
        fix = f"write --config {word}" if word.endswith((".yaml", ".yml")) else f"write --{word.replace('=', ' ', 1)}"
        faults.add(f"the argument {word!r}", "options, each with '--'", fix)
        return None
    if one.key.removesuffix("+") not in known:
        parent = max((key for key in known if one.key.startswith(f"{key}.")), key=len, default=None)
        if parent is None:
            _unknown(one.key, known, places, faults)
        elif not _is_argument(one.key, parent, classes, places, faults):
            parent = None
        return None if parent is None else one
    if one.key == "ckpt_path":
        check_checkpoint(one.value, faults)
    if one.key == "strategy":
        return one  # which is looked at together with the plan
    if one.key == "trainer.plugins" and not check_plugins(one.value, places, faults):
        return None
    value: Any = one.value
    as_object = one.key in _OBJECTS and isinstance(value, str) and not Path(value).exists()
    kept = without_faults({CLASS: value} if as_object else value, one.key, places, faults)
    if kept is _REFUSED:
        return None
    # an object by its name stays the word that it was
    return one if as_object or kept == value else Written(one.key, kept)


def _unknown(key: str, known: Sequence[str], places: Places, faults: Faults) -> None:
    parts = key.split(".")
    prefixes = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    # as much of the key as it takes until there is nothing of that name
    path = next((one for one in prefixes if not any(f"{name}.".startswith(f"{one}.") for name in known)), key)
    section, _, word = path.rpartition(".")
    head = f"{section}." if section else ""
    siblings = sorted({name[len(head) :].partition(".")[0] for name in known if name.startswith(head)})
    allowed, fix = ", ".join(siblings), did_you_mean(word, siblings, "remove it")
    if section == "trainer":
        allowed, fix = "an argument of Lightning's Trainer", targets.ELSEWHERE.get(word, fix)
    faults.add(f"unknown key {path}{places.of(key)}", allowed, fix)


def _is_argument(key: str, parent: str, classes: Mapping[str, str], places: Places, faults: Faults) -> bool:
    """Whether an option below an object is an argument of its class, where that is known."""
    name = key[len(parent) + 1 :].removeprefix("init_args.").partition(".")[0]
    if name in (CLASS, "help", "dict_kwargs") or "." not in classes.get(parent, ""):
        return True
    try:
        taken = targets.parameters(targets.locate(classes[parent]))
    except targets.UnknownTargetError:
        return False  # a fault of the class itself
    if taken is None or name in (allowed := [parameter.name for parameter in taken]):
        return True
    faults.add(f"unknown key {key}{places.of(key)}", ", ".join(allowed), did_you_mean(name, allowed, "remove it"))
    return False


def without_faults(value: Any, path: str, places: Places, faults: Faults) -> Any:
    """A value without what is wrong in the objects that it describes, at any depth; each of these is noted."""
    if isinstance(value, list):
        items = enumerate(cast("list[Any]", value))
        found = [without_faults(item, f"{path}.{index}", places, faults) for index, item in items]
        return [item for item in found if item is not _REFUSED]
    if not isinstance(value, Mapping):
        return value
    fields = dict(cast("Mapping[str, Any]", value))
    if "_target_" in fields:
        fix = f"write class_path: {fields['_target_']}, and its arguments below init_args"
        faults.add(f"{path}._target_{places.of(f'{path}._target_')}", "class_path and init_args", fix)
        return _REFUSED
    target, arguments = fields.get(CLASS), fields.get("init_args")
    if isinstance(target, str) and "." in target:
        taken = targets.taken(target, f"{path}.{CLASS}", places, faults)
        if taken is targets.UNKNOWN:
            return _REFUSED
        for key in fields.keys() - {CLASS, "init_args", "dict_kwargs"}:
            del fields[key]
            given = f"unknown key {path}.{key}{places.of(f'{path}.{key}')}"
            faults.add(given, "class_path, init_args, dict_kwargs", f"write it below init_args: {key}")
        if isinstance(arguments, Mapping):
            names = cast("Mapping[str, Any]", arguments)
            bad = targets.unknown_arguments(names, taken, f"{path}.init_args", places, faults)
            fields["init_args"] = {key: item for key, item in names.items() if key not in bad}
    found = {key: without_faults(item, f"{path}.{key}", places, faults) for key, item in fields.items()}
    return {key: item for key, item in found.items() if item is not _REFUSED}


def check_plugins(given: Any, places: Places, faults: Faults) -> bool:
    """Whether none of the plugins is a precision."""
    for plugin in cast("list[Any]", given) if isinstance(given, list) else [given]:
        name = plugin.get(CLASS) if hasattr(plugin, "get") else plugin
        if _is_precision(name):
            where = places.of("trainer.plugins")
            faults.add(
                f"trainer.plugins: {name}{where}", "plugins other than a precision", "set plan.precision instead"
            )
            return False
    return True


def _is_precision(target: Any) -> bool:
    if not isinstance(target, str) or "." not in target:
        return precision_word(target) is not None
    try:
        found: Any = targets.locate(target)
    except targets.UnknownTargetError:
        return False  # a fault by itself
    return isinstance(found, type) and issubclass(found, Precision)


# ---------------------------------------------------------------------- what jsonargparse says


def note(error: Exception, given: Arguments, good: Sequence[Written], faults: Faults) -> Written | None:
    """Note what jsonargparse refused, and return whose fault it is, if it is that of one of ``good``."""
    said = str(error).removeprefix("Validation failed: ")
    if said.startswith(_REQUIRED):
        tried = [one.key for one in given.written]
        for key in (word.strip() for word in said.removeprefix(_REQUIRED).split(", ")):
            if key not in tried and not nearest(key, [name for name in tried if name.count(".") == key.count(".")]):
                faults.add(f"no {key}", f"a value for {key}", f"write '{key}:' into the config, or --{key} ...")
        return None
    chain = ".".join(re.findall(r"Parser key \"([^\"]+)\"", said)).removeprefix(f"{given.command}.")
    below = [one for one in good if f"{chain}.".startswith(f"{one.key.replace('.init_args.', '.')}.")]
    culprit = max(reversed(below), key=lambda one: len(one.key), default=None)
    key = chain if culprit is None else culprit.key
    text = textwrap.shorten(essence(said), _LONGEST, placeholder=" …")
    fix = f"see the help of --{key}" if key else "see --help"
    if bare := re.search(r"Expected a dot import path string: (\w+)", said):
        near = callbacks.__all__ if key == "trainer.callbacks" else ()
        fix = did_you_mean(bare.group(1), near, "write package.module.Name")
    if needed := re.search(f"{_REQUIRED}(.*)", said):
        fix = f"write {', '.join(f'{key}.init_args.{name}' for name in needed.group(1).split(', '))}"
    faults.add(f"{key}{given.places.of(key)}: {text}" if key else text, "a value of its type", fix)
    return culprit


def essence(said: str) -> str:
    """What jsonargparse says of a value, in a line, without the types that were tried."""
    lines = [line.strip().removeprefix("- ") for line in said.splitlines()]
    kept = [line for line in lines if line and not _TRIED.match(line)]
    return "; ".join(dict.fromkeys(kept or lines)).replace(":; ", ": ")
