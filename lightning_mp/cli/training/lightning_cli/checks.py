"""What LightningCLI is given, looked at as a whole before jsonargparse, which stops at the first fault, parses it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from lightning_mp.cli.training import targets
from lightning_mp.cli.training.application import check_checkpoint
from lightning_mp.cli.training.lightning_cli.forms import CLASS, plan_form, strategy_form
from lightning_mp.cli.training.lightning_cli.given import Given
from lightning_mp.cli.training.targets import UnknownTargetError
from lightning_mp.compat.lightning import Precision, callbacks
from lightning_mp.errors import Fault, Faults, MissingExtraError, PlanError, nearest
from lightning_mp.policy import PRECISIONS, PrecisionPolicy
from lightning_mp.policy.load import plain_mapping
from lightning_mp.policy.presets import PRESETS
from lightning_mp.strategies import registry

SUBJECT = "cli"
_KEY_OF_ERROR = re.compile(r"Parser key \"([^\"]+)\"(?: element \d+)?|argument (?:-\w/)?--([\w.]+)")
#: lines of jsonargparse's messages that only list what was tried
_TRIED = (
    "Does not validate against",
    "Subtypes:",
    "Errors:",
    "Given value type:",
    "Given value: NestedArg(",
    "Given value: {",
    "Given value: [",
    "Expected a <class 'NoneType'>",
    "Expected a path but",
    "Not a valid subclass of",
    "Subclass types expect",
    "a class path (str)",
    "a dict with",
)
_REQUIRED = "the following arguments are required: "
_LONGEST = 500


# ---------------------------------------------------------------------- keys and classes


def check(given: Given, known: Sequence[str], faults: Faults) -> list[str]:
    """Note every fault that can be seen before anything is built; ``known`` are the parser's keys.

    Returns the keys that are to be left out from here on.
    """
    bad: list[str] = []
    for path, value in _below(given.values, known):
        if value is _UNKNOWN:
            bad.append(path)
            _tell_unknown(path, known, given, faults)
        elif path in _OBJECTS and isinstance(value, str) and not Path(value).exists():
            bad += _check_value({CLASS: value}, path, path, given, faults)
        else:
            bad += _check_value(value, path, path, given, faults)
    policy = _check_plan(given, faults)
    bad += [] if policy else ["plan"]
    bad += _check_strategy(given, policy, faults)
    bad += _check_plugins(given, faults)
    check_checkpoint(given.values.get("ckpt_path"), faults)
    return bad


_UNKNOWN = object()
#: keys that hold an object, or the name of its class
_OBJECTS = ("model", "data")


def _below(values: Mapping[str, Any], known: Sequence[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each key of the parser's that has a value, and each key that is none, marked as unknown; not the plan's."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if path == "plan":
            continue
        if path.removesuffix("+") in known:
            yield path, value
        elif not any(name.startswith(f"{path}.") for name in known):
            yield path, _UNKNOWN
        elif isinstance(value, Mapping):
            yield from _below(cast("Mapping[str, Any]", value), known, f"{path}.")


def _tell_unknown(path: str, known: Sequence[str], given: Given, faults: Faults) -> None:
    section, _, key = path.rpartition(".")
    head = f"{section}." if section else ""
    siblings = sorted({name[len(head) :].partition(".")[0] for name in known if name.startswith(head)})
    near = nearest(key, siblings)
    fix, allowed = f"did you mean {near}?" if near else "remove it", ", ".join(siblings)
    if section == "trainer":
        allowed, fix = "an argument of Lightning's Trainer", targets.ELSEWHERE.get(key, fix)
    faults.add(f"unknown key {path}{given.at(path)}", allowed, fix)


def _check_value(value: Any, path: str, key: str, given: Given, faults: Faults) -> list[str]:
    """Look at the objects that the value of ``key`` describes, at any depth; what is to be left out of it."""
    if isinstance(value, list):
        items = list(enumerate(cast("list[Any]", value)))
        return [bad for index, item in items for bad in _check_value(item, f"{path}.{index}", key, given, faults)]
    if not isinstance(value, Mapping):
        return []
    fields, bad = cast("Mapping[str, Any]", value), list[str]()
    if "_target_" in fields:
        fix = f"write class_path: {fields['_target_']}, and its arguments below init_args"
        faults.add(f"{path}._target_{given.at(f'{path}._target_')}", "class_path and init_args", fix)
        return [key]
    target = fields.get(CLASS)
    if isinstance(target, str) and "." in target:
        try:
            bad += _check_arguments(targets.locate(target), fields, path, given, faults)
        except UnknownTargetError as error:
            fix = (
                f"did you mean {error.near}?" if error.near else "write package.module.Name, and check that it imports"
            )
            where = given.at(f"{path}.{CLASS}")
            faults.add(f"{path}.{CLASS}: {target}{where}: {error}", "a class or function that can be imported", fix)
            return [key]
    for name, item in fields.items():
        bad += _check_value(item, f"{path}.{name}", key, given, faults)
    return bad


def _check_arguments(found: Any, spec: Mapping[str, Any], path: str, given: Given, faults: Faults) -> list[str]:
    bad = list[str]()
    for key in (key for key in spec if key not in (CLASS, "init_args", "dict_kwargs")):
        bad.append(f"{path}.{key}")
        fix = f"write it below init_args: {key}"
        faults.add(f"unknown key {path}.{key}{given.at(f'{path}.{key}')}", "class_path, init_args, dict_kwargs", fix)
    taken, arguments = targets.parameters(found), spec.get("init_args")
    if taken is None or not isinstance(arguments, Mapping):
        return bad
    allowed = [parameter.name for parameter in taken]
    for key in (key for key in cast("Mapping[str, Any]", arguments) if key not in allowed):
        where = f"{path}.init_args.{key}"
        bad.append(where)
        near = nearest(key, allowed)
        fix = f"did you mean {near}?" if near else "remove it"
        faults.add(f"unknown key {where}{given.at(where)}", ", ".join(allowed) or "no keys", fix)
    return bad


# ---------------------------------------------------------------------- plan, strategy, plugins


def _check_plan(given: Given, faults: Faults) -> PrecisionPolicy | None:
    plan = plan_form(given.values.get("plan", {}))
    where = given.at("plan")
    if isinstance(plan, str):
        near = nearest(plan, [*PRECISIONS, *PRESETS])
        fix = f"did you mean {near}?" if near else "write a precision, or check the path"
        faults.add(f"plan={plan!r}{where}", ", ".join([*PRECISIONS, *PRESETS, "the path of a YAML file"]), fix)
        return None
    if not isinstance(plan, Mapping):
        faults.add(f"plan: {plan!r}{where}", "a precision or a mapping of its fields", "write 'precision: bf16-mixed'")
        return None
    fields = {key: _as_target(value) for key, value in cast("Mapping[str, Any]", plan).items()}
    try:
        return PrecisionPolicy.from_dict(plain_mapping(fields))
    except PlanError as error:
        for fault in error.faults:
            said = f"plan: {fault.given.replace('_target_', f'loss_scaling.{CLASS}', 1)}"
            faults.add(f"{said}{_plan_place(said, given)}", fault.allowed, fault.fix)
    return None


def _as_target(piece: Any) -> Any:
    if not isinstance(piece, Mapping) or CLASS not in piece:
        return piece
    spec = cast("Mapping[str, Any]", piece)
    return {"_target_": spec[CLASS], **(spec.get("init_args") or {})}


def _plan_place(said: str, given: Given) -> str:
    pin = re.match(r"plan: pin '([^']*)'", said)
    if pin:
        return given.at(f"plan.pins.{pin.group(1)}")
    key = re.match(r"plan: (?:unknown key )?([\w.]+)", said)
    return given.at(f"plan.{key.group(1)}" if key else "plan")


def _check_strategy(given: Given, policy: PrecisionPolicy | None, faults: Faults) -> list[str]:
    strategy = strategy_form(given.values.get("strategy", "auto"))
    if isinstance(strategy, Mapping):
        keywords = dict(cast("Mapping[str, Any]", strategy))
        if CLASS in keywords or "_target_" in keywords:
            return []
        name = keywords.pop("name", "auto")
    else:
        name, keywords = strategy, dict[str, Any]()
    try:
        registry.build(name, policy, keywords)
    except PlanError as error:
        where = given.at("strategy")
        faults.extend(Fault(f"strategy: {fault.given}{where}", fault.allowed, fault.fix) for fault in error.faults)
    except MissingExtraError as error:
        faults.add(f"strategy: {error}", "an installed strategy", "install it, or choose another")
    else:
        return []
    return ["strategy"]


def _check_plugins(given: Given, faults: Faults) -> list[str]:
    trainer: Any = given.values.get("trainer")
    entries = trainer.get("plugins") if isinstance(trainer, Mapping) else None
    for entry in cast("list[Any]", entries) if isinstance(entries, list) else [entries]:
        target = entry.get(CLASS) if isinstance(entry, Mapping) else entry
        if _is_precision(target):
            where = given.at("trainer.plugins")
            faults.add(f"trainer.plugins: {target}{where}", "a plugin that is no precision", "the plan says it")
            return ["trainer.plugins"]
    return []


def _is_precision(target: Any) -> bool:
    if not isinstance(target, str) or "." not in target:
        return target in PRECISIONS
    try:
        found: Any = targets.locate(target)
    except UnknownTargetError:
        return False  # which is told by itself
    return isinstance(found, type) and issubclass(found, Precision)


# ---------------------------------------------------------------------- what jsonargparse refuses


def tell(error: Exception, given: Given, bad: Sequence[str], faults: Faults) -> str | None:
    """Note what jsonargparse refused; the key that it is about, or ``None`` where leaving one out would not help."""
    said = str(error).removeprefix("Validation failed: ")
    if said.startswith(_REQUIRED):
        for word in said.removeprefix(_REQUIRED).split(", "):
            key = word.strip().removeprefix(f"{given.command}.")
            misspelt = nearest(key, [path for path in bad if path.count(".") == key.count(".")])
            if key not in bad and not misspelt:
                fix = f"write '{key}:' into the config, or --{key} ..."
                faults.add(f"no {key}", f"a value for {key}", fix)
        return None
    match = _KEY_OF_ERROR.match(said)
    key = next(group for group in match.groups() if group).removeprefix(f"{given.command}.") if match else ""
    text = textwrap.shorten(essence(said[match.end() :] if match else said), _LONGEST, placeholder=" …")
    needed = re.search(f"{_REQUIRED}(.*)", said)
    fix = f"see the help of --{key}" if key else "see --help"
    stray = re.match(r"[Uu]nrecognized arguments: ([^\s-]\S*)", said)
    if stray:
        word = stray.group(1)
        fix = f"write --config {word}" if word.endswith((".yaml", ".yml")) else f"write --{word.replace('=', ' ', 1)}"
    bare = re.search(r"Expected a dot import path string: (\w+)", said)
    if bare:
        near = nearest(bare.group(1), callbacks.__all__) if key == "trainer.callbacks" else ""
        fix = f"did you mean {near}?" if near else "write package.module.Name"
    if needed:
        fix = f"write {', '.join(f'{key}.init_args.{name}' for name in needed.group(1).split(', '))}"
    faults.add(f"{key}{given.at(key)}: {text}" if key else text, "a value of its type", fix)
    return key or None


def essence(said: str) -> str:
    """What jsonargparse says of a value, in a line, without the types that were tried."""
    lines = [line.strip().removeprefix("- ") for line in said.lstrip(": ").splitlines()]
    kept = [line for line in lines if line and not line.startswith(_TRIED) and "Namespace(" not in line]
    return re.sub(r'Parser key "([^"]+)":', r"\1:", "; ".join(dict.fromkeys(kept or lines))).replace(":; ", ": ")
