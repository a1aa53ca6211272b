"""Whether the installed hosts still have the private names that this package uses."""

from __future__ import annotations

import dis
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import CodeType
from typing import Any

from lightning_mp.errors import Faults

#: the releases of each host that have every private name used here; pyproject.toml has the same bounds
VERSIONS = {
    "deepspeed": ">=0.19.8,<0.20",
    "lightning": ">=2.6,<2.7",
    "torch": ">=2.11,<2.14",
    "torchao": ">=0.18,<0.19",
    "transformers": ">=4.53,<6",
}


class PrivateNames:
    """Private names of one host, by the module (``"torch"``) or class (``"torch.amp:GradScaler"``) that has them.

    ``"torch.amp:GradScaler()"`` has what the class's own code assigns: to its instances, or to what it is given.
    """

    def __init__(self, host: str, names: Mapping[str, tuple[str, ...]]) -> None:
        self.host = host
        self.names = names

    def check(self, faults: Faults) -> None:
        """Note the names that the installed release does not have."""
        missing = self.missing()
        if missing:
            versions = f"{self.host} {VERSIONS[self.host]}"
            given = f"{self.host} {_installed(self.host)}, which has no {', '.join(missing)}"
            faults.add(given, versions, f"run pip install '{versions.replace(' ', '')}'")

    def require(self, subject: str) -> None:
        """Check for ``subject``, a strategy or a callback.

        Raises:
            PlanError: the names that are missing, and the releases that have them.
        """
        with Faults(subject) as faults:
            self.check(faults)

    def missing(self) -> list[str]:
        """The names that are not there, each behind its module or class."""
        return [
            f"{place.removesuffix('()').replace(':', '.')}.{name}".lstrip(".")
            for place, names in self.names.items()
            for name in names
            if not self._has(place, name)
        ]

    def _owner(self, place: str) -> Any:
        module, _, name = place.partition(":")
        try:
            found: Any = import_module(module)
        except ImportError:
            return None
        return getattr(found, name, None) if name else found

    def _has(self, place: str, name: str) -> bool:
        owner = self._owner(place.removesuffix("()"))
        return hasattr(owner, name) or (place.endswith("()") and _assigns(owner, name))


def _installed(host: str) -> str:
    try:
        return version(host)
    except PackageNotFoundError:  # under another name: pytorch-lightning
        return str(import_module(host).__version__)


def _assigns(owner: Any, name: str) -> bool:
    """Whether the code of a class and its bases, or of a module's functions, declares ``name`` or assigns it."""
    places: tuple[Any, ...] = owner.__mro__ if isinstance(owner, type) else () if owner is None else (owner,)
    return any(
        name in vars(one).get("__annotations__", ())
        or any(_stores(code, name) for item in vars(one).values() for code in _code_of(item))
        for one in places
    )


def _code_of(item: Any) -> Iterator[CodeType]:
    function = getattr(item, "__func__", getattr(item, "fget", item))
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    if isinstance(code, CodeType):
        yield code


def _stores(code: CodeType, name: str) -> bool:
    if name in code.co_names and any(
        step.opname == "STORE_ATTR" and step.argval == name for step in dis.get_instructions(code)
    ):
        return True
    return any(_stores(inner, name) for inner in code.co_consts if isinstance(inner, CodeType))
