"""Read configs as plain mappings, and find the line in which a key was written."""

import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

from lightning_mp.errors import Fault, Faults, PlanError, one_line
from lightning_mp.policy.pieces import LossScaling
from lightning_mp.policy.precision_policy import precision_fix, precision_word

#: functions that a ``_target_`` may name, besides the classes below
_CONSTRUCTORS = {
    f"LossScaling.{name}": getattr(LossScaling, name) for name in ["torch", "deepspeed", "megatron", "static"]
}
_CLASSES = ("MixedPrecisionPlan", "PrecisionPolicy", "LossScaling", "Pin", "Checkpointing", "NonFinite", "FP8")
#: Hydra's keys of a mapping that it instantiates
HYDRA_KEYS = ("_target_", "_convert_", "_recursive_")


def plain_mapping(config: Mapping[str, Any] | str | PathLike[str] | Any) -> dict[str, Any]:
    """Return a config as a dict.

    ``config`` is a mapping, an OmegaConf ``DictConfig``, the path of a YAML file, or a precision.
    Hydra's keys are left out. A mapping whose ``_target_`` names a function, such as
    ``LossScaling.deepspeed``, becomes the object that the function returns.

    Raises:
        PlanError: the file does not exist or is no YAML mapping, a value is missing, an
            interpolation does not resolve, or a ``_target_`` is not one of this package's. All
            faults of ``_target_`` keys are reported together.
    """
    if not isinstance(config, Mapping) and precision_word(config) and not Path(str(config)).is_file():
        return {"precision": config}
    from omegaconf import Container, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    plain = cast("Any", config)
    name = f"config {str(plain)!r}" if isinstance(config, (str, PathLike)) else ""
    if name and not Path(plain).is_file():
        near = "" if Path(plain).suffix else precision_fix(plain)
        raise PlanError.of(f"{name}, which is no file", near if "mean" in near else "give the path of a YAML file")
    try:
        plain = cast("Any", OmegaConf.load(plain)) if name else plain
        if isinstance(plain, Container):
            plain = OmegaConf.to_container(plain, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        given = f"{error.full_key} does not resolve: {str(error).splitlines()[0]}"
        raise PlanError.of(given, "give every '???' a value and every ${...} a target") from None
    except (YAMLError, OSError, ValueError) as error:
        raise PlanError.of(f"{name}: {one_line(error)}", "fix the file") from error
    if not isinstance(plain, Mapping):
        given = f"{name} holds a {type(plain).__name__}" if name else f"a config of type {type(plain).__name__}"
        raise PlanError.of(given, "write the plan's arguments as a mapping, 'precision: bf16-mixed'")
    with Faults() as faults:
        built = _built(plain, "", faults)
    return cast("dict[str, Any]", built)


def _built(value: Any, path: str, faults: Faults) -> Any:
    """Return ``value`` with each nested mapping reduced to its fields, or built by its ``_target_``.

    A fault is added for an unknown target, and for a call that fails. The fields are returned then.
    ``path`` is the dotted key of ``value``, with a dot at its end.
    """
    if isinstance(value, list):
        return [_built(item, path, faults) for item in cast("list[Any]", value)]
    if not isinstance(value, Mapping):
        return value
    given = cast("Mapping[str, Any]", value)
    fields = {key: _built(item, f"{path}{key}.", faults) for key, item in given.items() if key not in HYDRA_KEYS}
    target = given.get("_target_")
    if target is None or str(target).rpartition(".")[2] in _CLASSES:
        return fields
    build = _CONSTRUCTORS.get(".".join(str(target).split(".")[-2:]))
    if build is None:
        allowed = f"lightning_mp's {', '.join([*_CLASSES, *_CONSTRUCTORS])}"
        faults.add(f"{path}_target_: {target}", allowed=allowed, fix="name one of these")
        return fields
    try:
        return build(**fields)
    except PlanError as error:
        faults.extend(error.faults)
    except TypeError as error:
        faults.add(f"{path}_target_: {target} with {sorted(fields)}: {error}", fix="correct its arguments")
    return fields


class Places(dict[str, str]):
    """A mapping from dotted keys to the file and line of each. The place added last counts."""

    def add(self, path: Path) -> None:
        """Add every key of a YAML file.

        Raises:
            OSError: the file cannot be read.
            yaml.YAMLError: the file is no YAML.
        """
        import yaml

        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        self.update((key, f"{path.name}:{line}") for key, line in _keys(node, ""))

    def of(self, key: str) -> str:
        """Return `` (file:line)`` of the key, or of the nearest section around it; else an empty string."""
        while key and key not in self:
            key = key.rpartition(".")[0]
        return f" ({self[key]})" if key else ""

    def below(self, section: str, key: str) -> str:
        """Return :meth:`of` for a key of ``section``.

        If ``section`` has no such key, and exactly one key below it ends with ``key``, return the
        place of that one.
        """
        full, within = (f"{section}.{key}", f".{section}.") if section else (key, "")
        deeper = [place for place in self if place.endswith(f".{key}") and within in f".{place}"]
        return self.of(full if full in self or len(deeper) != 1 else deeper[0])


def plan_fault(fault: Fault, places: Places, section: str = "plan") -> Fault:
    """Return ``fault`` with ``section`` before its problem, and the place of its key after it if known."""
    key = re.match(r"pin '([^']*)'|(?:unknown key )?([\w.]+)", fault.problem)
    path = "" if key is None else key.group(2) or f"pins.{key.group(1)}"
    where = places.below(section, path) if path else places.of(section)
    return replace(fault, problem=f"{section}: {fault.problem}{where}".removeprefix(": "))


@contextmanager
def named_lines(config: object) -> Generator[None]:
    """Add file and line to the faults of a PlanError within, if ``config`` is the path of a YAML file.

    Faults whose line is unknown are given the file's name. For another ``config`` the PlanError is
    raised unchanged.
    """
    from yaml import YAMLError

    try:
        yield
    except PlanError as error:
        if not isinstance(config, (str, PathLike)) or not Path(config).is_file():
            raise
        path, places = Path(config), Places()
        with suppress(YAMLError, OSError, ValueError):  # the PlanError reports this error already
            places.add(path)
        placed = [plan_fault(fault, places, "") for fault in error.faults]
        named = [
            one if path.name in one.problem else replace(one, problem=f"{one.problem} ({path.name})") for one in placed
        ]
        raise PlanError(named, error.subject) from None


def _keys(node: Any, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield the dotted keys below ``node``, and their lines counted from 1.

    An entry of a list is named by its index. If it has a ``pattern``, it is named by that too.
    """
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
                if key.value == "pattern":  # a fault names a pin by its pattern
                    yield f"{prefix}.{item.value}", item.start_mark.line + 1
