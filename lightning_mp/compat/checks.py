"""Whether the installed releases of PyTorch, Lightning, DeepSpeed and torchao are within the tested bounds."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

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
        lowest, above = (_numbers(bound) for bound in VERSIONS[name].split(","))
        found = installed(name)
        if not lowest <= _numbers(found) < above:
            fix = f"run pip install '{name}{VERSIONS[name]}'"
            faults.add(f"{name} {found}, which is not tested", f"{name} {VERSIONS[name]}", fix)


def require_versions(subject: str, *names: str) -> None:
    """Check the named dependencies for ``subject``, a strategy or a callback.

    Raises:
        PlanError: one of them is installed in a release outside of its bounds.
    """
    with Faults(subject) as faults:
        check_versions(faults, *names)


def installed(name: str) -> str:
    """The installed release of a dependency."""
    try:
        return version(name)
    except PackageNotFoundError:  # under another name: pytorch-lightning
        return str(import_module("pytorch_lightning" if name == "lightning" else name).__version__)


def _numbers(release: str) -> tuple[int, ...]:
    """``"2.13.0a0+cpu"`` → ``(2, 13, 0)``."""
    found = re.search(r"\d+(?:\.\d+)*", release)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
