"""What a ``_target_`` names, and which keys may stand beside it."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning_mp.cli.training.primary import SECTIONS, SETTINGS
from lightning_mp.errors import Faults, did_you_mean, nearest, one_line
from lightning_mp.policy import Checkpointing, NonFinite, PrecisionPolicy, load
from lightning_mp.policy.loss_scaling import LossScaling
from lightning_mp.policy.places import Places

if TYPE_CHECKING:
    from omegaconf import DictConfig

HYDRA_KEYS = (*load.HYDRA_KEYS, "_partial_", "_args_")
#: Trainer arguments that have a section of their own
ELSEWHERE = {
    "callbacks": "write it in the callbacks section",
    "precision": "set plan.precision instead",
    "strategy": "write it in the strategy section",
}
_PLAN_PIECES = {
    "": PrecisionPolicy,
    "loss_scaling": LossScaling,
    "checkpointing": Checkpointing,
    "nonfinite": NonFinite,
}


class UnknownTargetError(LookupError):
    """A ``_target_`` that names nothing; ``near`` are the nearest names that do."""

    def __init__(self, message: str, near: str = "") -> None:
        super().__init__(message)
        self.near = near


@contextmanager
def importable(config: Path | None) -> Generator[None]:
    """Where a project's own modules are: the present folder, as for ``python -m``, and that of the config."""
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    if config is not None:
        sys.path.append(str(config.resolve().parent))
    try:
        yield
    finally:
        sys.path[:] = before


def locate(path: str) -> Callable[..., Any]:
    """What the dotted ``path`` names; its module is imported.

    Raises:
        UnknownTargetError: there is no such thing, its module cannot be imported, or it cannot be called.
    """
    parts = path.split(".")
    found, depth = _module(parts)
    for place, name in enumerate(parts[depth:], start=depth):
        if not hasattr(found, name):
            home = ".".join(parts[:place])
            near = nearest(name, [known for known in _names(found) if not known.startswith("_")])
            raise UnknownTargetError(f"{home!r} has no {name!r}", near)
        found = getattr(found, name)
    if not callable(found):
        raise UnknownTargetError(f"a {type(found).__name__}, which cannot be called")
    return found


def _module(parts: list[str]) -> tuple[Any, int]:
    """The innermost module of a dotted path, and how many of its parts it takes."""
    found: Any = None
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        try:
            found = import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise UnknownTargetError(f"importing {name!r} failed: {error}") from error
            if found is None:
                near = nearest(name, [known for known in sys.modules if "." not in known and not known.startswith("_")])
                raise UnknownTargetError(f"no module {name!r}", near) from error
            return found, depth - 1
        except Exception as error:  # whatever the user's module does when it is imported
            said = one_line(error)
            raise UnknownTargetError(f"importing {name!r} failed: {type(error).__name__}: {said}") from error
    return found, len(parts)


def _names(found: Any) -> list[str]:
    names = dir(found)
    if hasattr(found, "__path__"):
        names += [module.name for module in pkgutil.iter_modules(found.__path__)]
    return names


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


#: for ``taken``: there is no such target
UNKNOWN: list[inspect.Parameter] = []


def taken(target: str, path: str, places: Places, faults: Faults) -> list[inspect.Parameter] | None:
    """The :func:`parameters` of a target, written at ``path``; ``UNKNOWN`` with a fault where it names nothing."""
    try:
        return parameters(locate(target))
    except UnknownTargetError as error:
        fix = f"did you mean {error.near}?" if error.near else "write package.module.Name, and check that it imports"
        faults.add(f"{path}: {target}{places.of(path)}: {error}", "a class or function that can be imported", fix)
    return UNKNOWN


def unknown_arguments(
    given: Iterable[str], known: list[inspect.Parameter] | None, path: str, places: Places, faults: Faults
) -> list[str]:
    """Those of the keys at ``path`` that are none of ``known``, with a fault each."""
    names = [parameter.name for parameter in known or ()]
    unknown = [] if known is None else [key for key in given if key not in names]
    for key in unknown:
        where = places.of(f"{path}.{key}")
        faults.add(
            f"unknown key {path}.{key}{where}", ", ".join(names) or "no keys", did_you_mean(key, names, "remove it")
        )
    return unknown


def trainer_arguments() -> list[str]:
    """What may stand in the trainer section."""
    from lightning_mp.strategies import registry

    return [name for name in registry.trainer_arguments() if name not in ELSEWHERE]


def plain(config: DictConfig) -> dict[str, Any]:
    """The config as written: interpolations and missing values stay words."""
    from omegaconf import OmegaConf

    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))


def allowed_at(config: DictConfig, key: str) -> tuple[str, str, list[str] | None]:
    """For a dotted key: as much of its path as is there, the first part that is not, and what may stand in its place.

    The part is empty where all is there; ``None`` is anything.
    """
    there, part, value = walk(plain(config), key)
    if not isinstance(value, Mapping):
        return there, part, None if part == "" or value is None else []
    keys = [name for name in cast("Mapping[str, Any]", value) if name not in (*HYDRA_KEYS, "hydra")]
    known = _known(there, cast("Mapping[str, Any]", value))
    return there, part, None if known is None else sorted({*keys, *known})


def walk(value: Any, key: str) -> tuple[str, str, Any]:
    """Down a dotted key: as much of it as is there, the first part that is not (or ""), and the value that far."""
    there: list[str] = []
    for part in key.split("."):
        if isinstance(value, Mapping) and part in value:
            value = cast("Mapping[str, Any]", value)[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(cast("list[Any]", value)):
            value = cast("list[Any]", value)[int(part)]
        else:
            return ".".join(there), part, value
        there.append(part)
    return ".".join(there), "", value


def _known(path: str, value: Mapping[str, Any]) -> list[str] | None:
    """What may stand in the mapping at ``path``; nothing new where it builds nothing."""
    target = value.get("_target_")
    section, _, piece = path.partition(".")
    if path == "":
        return [*SECTIONS, *SETTINGS]
    if path == "trainer":
        return trainer_arguments()
    if section == "plan" and piece in _PLAN_PIECES and not str(target).rpartition(".")[2].islower():
        return [item.name for item in fields(_PLAN_PIECES[piece])]
    if path == "plan.pins":
        return None
    return _argument_names(target) if isinstance(target, str) else []


def _argument_names(target: str) -> list[str] | None:
    try:
        taken = parameters(locate(target))
    except UnknownTargetError:
        return None  # a fault by itself
    return None if taken is None else [parameter.name for parameter in taken]
