"""Which releases of the hosts are supported, and what is used of them beyond their public names.

The policy, for each host (a package that this one is built on):

- A release below the oldest supported one is refused.
- A release from the oldest to the newest tested one runs without a word.
- Above the newest tested one, the private names that the run needs are looked up. If the release has
  all of them, the run goes on and one warning names both releases. Otherwise the run is refused, by
  the name that is missing.
"""

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from lightning_mp.compat.private_names import missing_names
from lightning_mp.errors import Faults


@dataclass(frozen=True, slots=True)
class Host:
    """The supported releases of a host. Patch releases of the newest tested one count as tested."""

    oldest: str
    newest: str
    #: the next major release; pyproject.toml excludes it too
    below: str

    @property
    def bounds(self) -> str:
        """Return the range that pyproject.toml allows, such as ``>=2.11,<3``."""
        return f">={self.oldest},<{self.below}"


#: ``make test-oldest`` runs the oldest releases, ``make test`` and ``make test-newest`` the newest.
HOSTS = {
    "deepspeed": Host("0.19.8", newest="0.19", below="1"),
    "lightning": Host("2.6", newest="2.6", below="3"),
    "torch": Host("2.11", newest="2.14", below="3"),
    "torchao": Host("0.18", newest="0.18", below="1"),
    "transformers": Host("4.53", newest="5.24", below="6"),
}


def check_versions(faults: Faults, *needs: str) -> None:
    """Check the installed releases of ``needs`` against the policy of this module.

    ``needs`` are keys of ``PRIVATE_NAMES``: a host (``"torch"``), or a part of one (``"torch:sharding"``).
    A refusal is added to ``faults``. A release above the newest tested one is warned of once a process.
    """
    for need in needs:
        name = need.partition(":")[0]
        host, release = HOSTS[name], installed(name)
        # The base version: NVIDIA's containers hold pre-releases, such as 2.11.0a0+nv26.02.
        parsed = Version(Version(release).base_version)
        if parsed < Version(host.oldest) or parsed >= Version(host.below):
            allowed = f"{name} {host.bounds}"
            fix = f"run pip install '{name}{host.bounds}'"
            faults.add(f"{name} {release}, which is not supported", allowed=allowed, fix=fix)
        elif is_untested(parsed, host):
            _check_untested(faults, need, release, host.newest)


def is_untested(release: Version, host: Host) -> bool:
    """Return True if ``release`` is of a later feature release (``2.15``) than the newest tested one."""
    return release.release[:2] > Version(host.newest).release[:2]


def _check_untested(faults: Faults, need: str, release: str, newest: str) -> None:
    """Add a fault for each private name that the release lacks, or warn that it is newer than tested."""
    name = need.partition(":")[0]
    missing = missing_names(need)
    for dotted in missing:
        problem = f"this run needs {dotted}, which {name} {release} does not have"
        faults.add(problem, fix=f"run pip install '{name}=={newest}.*', the newest tested release")
    if not missing:
        _warn_once(
            f"{name} {release} is newer than {newest}, the newest release that lightning_mp is tested with. "
            "It has every private name that this run needs, so the run goes on."
        )


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)


def require_versions(subject: str, *needs: str) -> None:
    """Check ``needs`` as :func:`check_versions` does.

    Raises:
        PlanError: of ``subject``, a strategy or a callback, with every refusal.
    """
    with Faults(subject) as faults:
        check_versions(faults, *needs)


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
