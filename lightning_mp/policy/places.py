"""Where a key of a composed config was written: file and line, or the command line."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_mp.errors import Fault, PlanError


class Places:
    """Dotted keys and where each was written; of several places the one added last."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def add(self, path: Path, prefix: str = "") -> None:
        """Note every key of a YAML file, which stands at ``prefix`` in the config."""
        import yaml

        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        for key, line in _keys(node, prefix):
            self._found[key] = f"{path.name}:{line}"

    def add_key(self, key: str, where: str) -> None:
        """Note that ``key`` was written somewhere else."""
        self._found[key] = where

    def of(self, key: str) -> str:
        """`` (file:line)`` of the key, or of what it stands in; empty where that is not known."""
        while key:
            if key in self._found:
                return f" ({self._found[key]})"
            key = key.rpartition(".")[0]
        return ""

    def below(self, section: str, key: str) -> str:
        """As :meth:`of`, for a key of ``section`` or, by its last part alone, of what stands in it."""
        full, within = (f"{section}.{key}", f".{section}.") if section else (key, "")
        deeper = [found for found in self._found if found.endswith(f".{key}") and within in f".{found}"]
        return self.of(full if full in self._found or len(deeper) != 1 else deeper[0])


def plan_fault(fault: Fault, places: Places, section: str = "plan") -> Fault:
    """A fault of a plan, with the place of the key that it is about."""
    key = re.match(r"pin '([^']*)'|(?:unknown key )?([\w.]+)", fault.given)
    path = "" if key is None else key.group(2) or f"pins.{key.group(1)}"
    where = places.below(section, path) if path else places.of(section)
    return replace(fault, given=f"{section}: {fault.given}{where}" if section else f"{fault.given}{where}")


@contextmanager
def named_lines(config: object) -> Generator[None]:
    """Faults of a plan are named with their lines, where ``config`` is the path of a YAML file."""
    from yaml import YAMLError

    try:
        yield
    except PlanError as error:
        path = Path(config) if isinstance(config, (str, PathLike)) else None
        if path is None or not path.is_file():
            raise
        places = Places()
        with suppress(YAMLError, OSError, ValueError):  # which is the fault then
            places.add(path)
        placed = [_in_file(plan_fault(fault, places, ""), path) for fault in error.faults]
        raise PlanError(placed, error.subject) from None


def _in_file(fault: Fault, path: Path) -> Fault:
    return fault if path.name in fault.given else replace(fault, given=f"{fault.given} ({path.name})")


def _keys(node: Any, prefix: str) -> Iterator[tuple[str, int]]:
    """The dotted keys below ``node`` and their lines, from 1."""
    if getattr(node, "id", "") == "mapping":
        for key, value in node.value:
            name = f"{prefix}.{key.value}" if prefix else str(key.value)
            yield name, key.start_mark.line + 1
            yield from _keys(value, name)
    elif getattr(node, "id", "") == "sequence":
        for index, value in enumerate(node.value):
            yield f"{prefix}.{index}", value.start_mark.line + 1
            yield from _keys(value, f"{prefix}.{index}")
            for key, item in value.value if value.id == "mapping" else ():
                if key.value == "pattern":  # by which a pin is named
                    yield f"{prefix}.{item.value}", item.start_mark.line + 1
