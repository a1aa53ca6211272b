"""What LightningCLI is given, key by key, and where each was written; jsonargparse parses all of it but the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml
from jsonargparse import get_loader

from lightning_mp.cli.training.lightning_cli.plan_section import load
from lightning_mp.cli.training.primary import mapping
from lightning_mp.errors import Faults, did_you_mean
from lightning_mp.policy import precision_word
from lightning_mp.policy.places import Places
from lightning_mp.policy.presets import PRESETS

SUBCOMMANDS = ("fit", "validate", "test", "predict")
_CONFIG_OPTIONS = ("config", "c")
_PRINTS = "print_"


@dataclass(frozen=True, slots=True)
class Written:
    """A key and its value, as an option or in a config; an argument that is no option has no key."""

    key: str
    value: Any
    option: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The words of a command line for it.

        Raises:
            YAMLError: a value from Python that YAML cannot write.
        """
        nested = self.value
        for part in reversed(self.key.split(".")):
            nested = {part: nested}
        return self.option or ("--config", flow(nested))


@dataclass(frozen=True, slots=True)
class Arguments:
    """Config files and options in their order."""

    command: str | None = None
    written: list[Written] = field(default_factory=list[Written])
    #: the layers of the plan: a dotted key below it, and its value
    plan: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    #: the words without those of the plan, for jsonargparse
    words: list[str] = field(default_factory=list[str])
    prints: bool = False
    places: Places = field(default_factory=Places)


def flow(value: Any) -> str:
    """A value as YAML in one line."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=2**31)


def grouped(arguments: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The arguments, an option together with its value."""
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        takes = word.startswith("-") and "=" not in word and rest and not rest[0].startswith("--")
        yield (word, rest.pop(0)) if takes else (word,)


def option(words: Sequence[str]) -> tuple[str, str]:
    """An option's key and value: of ``--a.b=c``, ``--a.b c``, ``-c file``; a bare ``--a`` is true."""
    key, equals, value = words[0].lstrip("-").partition("=")
    return key, value if equals else words[1] if len(words) > 1 else "true"


def config_files(arguments: Sequence[str]) -> list[Path]:
    """The config files that the arguments name."""
    found = [option(words) for words in grouped(arguments) if words[0].startswith("-")]
    return [Path(value) for key, value in found if key in _CONFIG_OPTIONS]


def command_of(arguments: Sequence[str] | Mapping[str, Any], commands: Sequence[str], faults: Faults) -> str:
    """The subcommand among what is given; a fault where there is none."""
    if isinstance(arguments, Mapping):
        named = arguments.get("subcommand")
        words = [named] if named is not None else [key for key in arguments if key in commands]
    else:
        words = [words[0] for words in grouped(arguments) if not words[0].startswith("-")]
    word = str(words[0]) if words else ""
    if word not in commands:
        fix = did_you_mean(word, commands, f"write one of these first: {commands[0]} --config run.yaml")
        faults.add(f"the command {word!r}" if word else "no command", ", ".join(commands), fix)
    return word


def read(
    arguments: Sequence[str] | Mapping[str, Any], command: str | None, known: Sequence[str], mode: str, faults: Faults
) -> Arguments:
    """Read the config files (``mode`` is the parser's) and the options; ``known`` are the parser's keys."""
    found = Arguments(command, prints=_prints(arguments), places=Places(command))
    if isinstance(arguments, Mapping):
        _add(arguments, found, known)
        return found
    for words in grouped(arguments):
        if not words[0].startswith("-"):
            found.words.extend(words)
            found.written.extend([Written("", words[0], words)] if words[0] != command else [])
            continue
        key, value = option(words)
        if key == "plan" or key.startswith("plan."):
            found.plan.append((key[len("plan.") :], load(value)))
            found.places.add_key(key, "on the command line")
            continue
        found.words.extend(words)
        if key in _CONFIG_OPTIONS:
            config = _config(value, found, mode, faults)
            if config is not None:
                _add(config, found, known)
        elif not key.startswith(_PRINTS):
            found.written.append(Written(key.removesuffix("+"), load(value), words))
            found.places.add_key(key.removesuffix("+"), "on the command line")
    return found


def _prints(arguments: Sequence[str] | Mapping[str, Any]) -> bool:
    return not isinstance(arguments, Mapping) and any(word.startswith(f"--{_PRINTS}") for word in arguments)


def _add(config: Mapping[str, Any], found: Arguments, known: Sequence[str]) -> None:
    """Note a config's keys for this command: a file for all of them has a section for each."""
    own = config.get(found.command) if found.command is not None else None
    keys = {key: value for key, value in config.items() if key not in (*SUBCOMMANDS, "subcommand")}
    keys |= cast("Mapping[str, Any]", own) if isinstance(own, Mapping) else {}
    if "plan" in keys:
        found.plan.append(("", keys.pop("plan")))
    found.written.extend(Written(key, value) for key, value in _leaves(keys, known))


def _leaves(values: Mapping[str, Any], known: Sequence[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each key of the parser's that has a value, and each key that is none."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and path not in known and any(name.startswith(f"{path}.") for name in known):
            yield from _leaves(cast("Mapping[str, Any]", value), known, f"{path}.")
        else:
            yield path, value


def _config(value: str, found: Arguments, mode: str, faults: Faults) -> Mapping[str, Any] | None:
    path = Path(value)
    if not path.is_file():
        inline = load(value)
        if not isinstance(inline, Mapping) and "://" not in value:
            fix = did_you_mean(path.name, [other.name for other in path.parent.glob("*.y*ml")], "check the path")
            faults.add(f"config {value!r}, which is no file", "a YAML file", fix)
        return cast("Mapping[str, Any]", inline) if isinstance(inline, Mapping) else None

    def loaded() -> Any:
        found.places.add(path)
        return get_loader("omegaconf" if mode == "omegaconf" else "yaml")(path.read_text(encoding="utf-8"))

    config = mapping(value, loaded, faults)
    return None if config is None else {key: _beside(key, item, path, found) for key, item in config.items()}


def _beside(key: str, value: Any, config: Path, found: Arguments) -> Any:
    """A value of a config, with a plan's file by its path from here."""
    if key == found.command and isinstance(value, Mapping):
        return {name: _beside(name, item, config, found) for name, item in cast("Mapping[str, Any]", value).items()}
    if key != "plan" or not isinstance(value, str) or value in PRESETS or precision_word(value):
        return value
    path = config.parent / value
    if not path.is_file():
        return value
    found.places.add(path, "plan")
    return str(path)
