"""The releases that are supported, and what is used of torch, Lightning and DeepSpeed beyond their public names."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet

from lightning_mp.errors import Faults

#: the releases that this package is tested with; pyproject.toml has the same bounds
VERSIONS = {
    "deepspeed": ">=0.19.8,<0.20",
    "lightning": ">=2.6,<2.7",
    "torch": ">=2.11,<2.14",
    "torchao": ">=0.18,<0.19",
    "transformers": ">=4.53,<6",
}


def check_versions(faults: Faults, *names: str) -> None:
    """Note each of the named dependencies that is installed in a release outside of its bounds."""
    for name in names:
        release = installed(name)
        if not SpecifierSet(VERSIONS[name]).contains(release, prereleases=True):
            fix = f"run pip install '{name}{VERSIONS[name]}'"
            faults.add(f"{name} {release}, which is not tested", allowed=f"{name} {VERSIONS[name]}", fix=fix)


def require_versions(subject: str, *names: str) -> None:
    """Raise a PlanError of ``subject``, a strategy or a callback, where a dependency is out of its bounds."""
    with Faults(subject) as faults:
        check_versions(faults, *names)


def installed(name: str) -> str:
    """The installed release of a dependency."""
    try:
        return version(name)
    except PackageNotFoundError:  # under another name: pytorch-lightning
        return str(import_module("pytorch_lightning" if name == "lightning" else name).__version__)


@contextmanager
def quietly(level: int = logging.WARNING) -> Generator[None, None, None]:
    """Within, nothing of ``level`` or below it is logged."""
    before = logging.root.manager.disable
    logging.disable(level)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def patched(owner: Any, **values: Any) -> Generator[None, None, None]:
    """Within, attributes of ``owner`` have other values; those before come back, also after a failure."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:  # of an instance, or a class, what is its class's or its base's is not put in its own place
            setattr(owner, name, before[name]) if name in before else delattr(owner, name)
