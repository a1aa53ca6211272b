"""Public names that are made of Lightning's classes, for a program that has not imported Lightning yet.

``from lightning_mp import MixedPrecisionPlan`` often stands above ``import pytorch_lightning``, since isort puts it
there. Until one of Lightning's two copies is loaded, such a name is therefore a stand-in; its first use makes the real
class or function, of the copy that the program has imported by then.
"""

from __future__ import annotations

import copyreg
import inspect
from abc import ABCMeta
from importlib import import_module
from typing import Any

from lightning_mp.compat.host import imported

_stand_ins: dict[tuple[str, str], Any] = {}


def fetch(home: str, name: str) -> Any:
    """``name`` of the module ``home``; a stand-in for it while neither copy of Lightning is loaded."""
    if imported():
        return _load(home, name)
    if (home, name) not in _stand_ins:
        _stand_ins[home, name] = _class(home, name) if name[0].isupper() else _Function(home, name)
    return _stand_ins[home, name]


def _load(home: str, name: str) -> Any:
    value = getattr(import_module(home), name)
    import_module("lightning_mp.strategies.registry").register()  # by name: a layer far above this one
    return value


class _Class(ABCMeta):  # of ABCMeta, so that a subclass may have an abstract base besides
    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        # Somebody subclasses a stand-in: they get a subclass of what it stands for.
        return type(name, tuple(map(_real, bases)), namespace, **options)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _real(cls)(*args, **kwargs)

    def __getattribute__(cls, name: str) -> Any:
        if name in ("__class__", "__module__", "__name__", "__qualname__"):
            return type.__getattribute__(cls, name)
        return inspect.signature(_real(cls)) if name == "__signature__" else getattr(_real(cls), name)

    def __setattr__(cls, name: str, value: Any) -> None:
        setattr(_real(cls), name, value)

    def __delattr__(cls, name: str) -> None:
        delattr(_real(cls), name)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _real(cls))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(_real(subclass), _real(cls))

    def __dir__(cls) -> list[str]:
        return dir(_real(cls))


def _class(home: str, name: str) -> Any:
    return type.__new__(_Class, name, (), {"__module__": home})


def _real(cls: Any) -> Any:
    return _load(cls.__module__, cls.__name__) if type(cls) is _Class else cls


class _Function:
    def __init__(self, home: str, name: str) -> None:
        self.__module__, self.__name__, self.__qualname__ = home, name, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _load(self.__module__, self.__name__)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        real = _load(self.__module__, self.__name__)
        return inspect.signature(real) if name == "__signature__" else getattr(real, name)

    @property
    def __doc__(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _load(self.__module__, self.__name__).__doc__

    def __reduce__(self) -> Any:
        return fetch, (self.__module__, self.__name__)


copyreg.pickle(_Class, lambda cls: (fetch, (cls.__module__, cls.__name__)))  # pyright: ignore[reportArgumentType]
