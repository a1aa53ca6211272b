"""What LightningCLI is given: command line and config files together, and where each key was written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml
from jsonargparse import get_loader

from lightning_mp.cli.training.lightning_cli.forms import CLASS, FORMS, SUBCOMMANDS, load, settle
from lightning_mp.cli.training.places import Places
from lightning_mp.errors import Faults, nearest, one_line
from lightning_mp.policy import PRECISIONS
from lightning_mp.policy.presets import PRESETS

#: what a command line or Python gives
Arguments = Sequence[str] | Mapping[str, Any]
_PINS = "plan.pins."
_CONFIG_OPTIONS = ("config", "c")
_ASKS = re.compile(r"^(-h|--help|--[\w.]+\.help)(=|$)")
_PRINTS = "print_"
_HERE = " (on the command line)"


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether the arguments ask for a help."""
    return any(_ASKS.match(word) for word in arguments)


def prints_config(arguments: Arguments) -> bool:
    """Whether the arguments want the config printed, and nothing run."""
    return not isinstance(arguments, Mapping) and any(key.startswith(_PRINTS) for key, _ in options(arguments))


@dataclass(frozen=True, slots=True)
class Given:
    """What the config files and the options say together, the later over the earlier, and where each was written."""

    command: str | None = None
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    options: set[str] = field(default_factory=set[str])
    places: Places = field(default_factory=Places)

    def at(self, key: str) -> str:
        """`` (file:line)`` of a key; an argument may also be given by its short form ``--model.width``."""
        if {key, key.replace(".init_args.", ".")} & self.options:
            return _HERE
        found = self.places.of(key) or (self.places.of(f"{self.command}.{key}") if self.command else "")
        return found or (_HERE if any(option.startswith(f"{key}.") for option in self.options) else "")


def command_of(arguments: Arguments, commands: Sequence[str], faults: Faults) -> str | None:
    """The subcommand among what is given; a fault where there is none."""
    if isinstance(arguments, Mapping):
        named = arguments.get("subcommand")
        words = [named] if named is not None else [key for key in arguments if key in commands]
    else:
        words = [words[0] for words in _grouped(arguments) if not words[0].startswith("-")]
    word = str(words[0]) if words else ""
    if word in commands:
        return word
    near = nearest(word, commands)
    fix = f"did you mean {near}?" if near else f"write one of these first: {commands[0]} --config run.yaml"
    faults.add(f"command {word!r}" if word else "no command", ", ".join(commands), fix)
    return None


def gather(arguments: Arguments, command: str | None, mode: str, faults: Faults) -> Given:
    """Read the config files (``mode`` is the parser's) and the options; what cannot be read is noted."""
    given = Given(command)
    if isinstance(arguments, Mapping):
        _merge(given.values, settle(_own(arguments, command)))
        return given
    for key, value in options(arguments):
        if key in _CONFIG_OPTIONS:
            for config in _config(value, given, mode, faults):
                _merge(given.values, settle(config))
        elif not key.startswith(_PRINTS):
            given.options.add(key.removesuffix("+"))
            _set(given.values, key, load(value))
    return given


def options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The options and their values, without dashes: ``--a.b=c``, ``--a.b c``, ``-c file``; a bare ``--a`` is true."""
    for words in _grouped(arguments):
        if words[0].startswith("-"):
            key, equals, value = words[0].lstrip("-").partition("=")
            yield key, value if equals else words[1] if len(words) > 1 else "true"


def _grouped(arguments: Sequence[str]) -> Iterator[list[str]]:
    """The arguments, an option together with its value."""
    rest = list(arguments)
    while rest:
        words = [rest.pop(0)]
        if words[0].startswith("-") and "=" not in words[0] and rest and not rest[0].startswith("--"):
            words.append(rest.pop(0))
        yield words


def settled(arguments: Sequence[str], given: Given, dropped: Sequence[str]) -> list[str]:
    """The arguments without the options for ``dropped`` keys, and with a plan in the form that the parser knows."""
    found: list[str] = []
    pins = any(key.startswith(_PINS) for key in given.options) and "plan" not in dropped
    for words in _grouped(arguments):
        key = words[0].lstrip("-").partition("=")[0].removesuffix("+")
        if key.startswith(_PINS):
            continue  # their patterns may have dots, which the parser would take apart
        forms = [form for one in dropped for form in (one, one.replace(".init_args.", "."))]
        if words[0].startswith("--") and any(key == form or key.startswith(f"{form}.") for form in forms):
            continue
        form = settle({key: load(next(options(words))[1])})[key] if words[0].startswith("--") and key in FORMS else None
        found += [f"--{key}", _flow(form)] if isinstance(form, Mapping) else words
    return [*found, "--plan.pins", _flow(given.values["plan"]["pins"])] if pins else found


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False)


def config_files(arguments: Sequence[str]) -> list[Path]:
    """The config files that the arguments name."""
    return [Path(value) for key, value in options(arguments) if key in _CONFIG_OPTIONS]


def _config(value: str, given: Given, mode: str, faults: Faults) -> Iterator[dict[str, Any]]:
    path = Path(value)
    if not path.is_file():
        inline = load(value)
        if isinstance(inline, Mapping):
            yield _own(inline, given.command)
        elif "://" not in value:
            near = nearest(path.name, [other.name for other in path.parent.glob("*.y*ml")])
            fix = f"did you mean {near}?" if near else "check the path"
            faults.add(f"config {value!r}, which is no file", "a YAML file", fix)
        return
    try:
        given.places.add(path)
        loaded = get_loader("omegaconf" if mode == "omegaconf" else "yaml")(path.read_text(encoding="utf-8"))
    except Exception as error:  # those of PyYAML, OmegaConf and the file system share no base class
        faults.add(f"config {value!r}: {one_line(error)}", "a YAML mapping", "mend the file")
        return
    if isinstance(loaded, Mapping):
        own = _own(loaded, given.command)
        plan = own.get("plan")
        beside = path.parent / plan if isinstance(plan, str) else path
        if isinstance(plan, str) and plan not in (*PRECISIONS, *PRESETS) and beside.is_file():
            given.places.add(beside, "plan")
            own["plan"] = str(beside)
        yield own
    else:
        faults.add(f"config {value!r}, a {type(loaded).__name__}", "a YAML mapping", "write 'plan:' and 'model:'")


def _own(config: Any, command: str | None) -> dict[str, Any]:
    """A config's keys for this command: a file for all of them has a section for each."""
    own = config.get(command) if command is not None else None
    for_all = {key: value for key, value in config.items() if key not in SUBCOMMANDS}
    return {**for_all, **cast("Mapping[str, Any]", own)} if isinstance(own, Mapping) else for_all


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    """Lay an option's value over the others."""
    # the part of a pin's option that follows is a pattern, and may have dots
    parts = ["plan", "pins", key[len(_PINS) :]] if key.startswith(_PINS) else key.removesuffix("+").split(".")
    at: Any = values
    if parts[:2] == ["plan", "pins"] and len(parts) == 3 and isinstance(values.get("plan", {}).get("pins"), list):
        values["plan"]["pins"] = [*values["plan"]["pins"], {"pattern": parts[2], "dtype": value}]
        return
    for part in parts[:-1]:
        at = at.get(part) if isinstance(at, Mapping) else at
    if isinstance(at, list):
        return  # of the last object of a list: jsonargparse knows which of its arguments is meant
    if key.endswith("+"):
        old = at.get(parts[-1]) if isinstance(at, Mapping) else None
        value = [*(cast("list[Any]", old) if isinstance(old, list) else []), value]
    for part in reversed(parts):
        value = {part: value}
    _merge(values, settle(value))


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Lay ``new`` over ``into``, as jsonargparse does: an object of another class replaces all of one."""
    for key, value in new.items():
        old: Any = into.get(key)
        if not isinstance(old, dict) or not isinstance(value, Mapping):
            into[key] = value
            continue
        both, fresh = cast("dict[str, Any]", old), cast("Mapping[str, Any]", value)
        if CLASS in fresh and fresh[CLASS] != both.get(CLASS):
            both = dict[str, Any]()
        elif CLASS in both and not fresh.keys() & {CLASS, "init_args"}:
            fresh = {"init_args": fresh}
        into[key] = dict(both)
        _merge(into[key], fresh)
