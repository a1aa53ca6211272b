"""Register the ``mp_*`` strategies with Lightning, without importing it: now if it is there, else when it comes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_STRATEGIES = "lightning.pytorch.strategies"


def register_with_lightning() -> None:
    """Make ``Trainer(strategy="mp_fsdp2")`` and the others known, whichever package is imported first."""
    if _STRATEGIES in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Waiting())


def _register() -> None:
    import_module("lightning_mp.strategies.registry").register()  # a floor far above this one


class _Waiting(MetaPathFinder):
    """Finds nothing but Lightning's strategies, once, and registers ours as soon as they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _STRATEGIES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(Loader):
    """The loader it is given, followed by the registration."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register()
