"""The weights and optimizer states of a checkpoint folder, as hooks see them: read only if a hook asks for a value.

Each rank loads its own shards of a folder, so a whole copy of the model would be read for nothing where
``on_load_checkpoint`` looks at other keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

#: the value of a name that was not read yet
_UNREAD: Any = object()


class LazyWeights(MutableMapping[str, Any]):
    """A folder's state dict. The first access to a value reads all weights, whole and on the CPU.

    Names can be listed and deleted without that.

    Args:
        names: the names of the weights in the folder.
        read: returns all weights of the folder by name.
    """

    def __init__(self, names: Iterable[str], read: Callable[[], Mapping[str, Any]]) -> None:
        self._values: dict[str, Any] = dict.fromkeys(names, _UNREAD)
        self._read = read
        #: whether a value was read, set or deleted: the weights are then no longer known to be those of the folder
        self.touched = False

    def __getitem__(self, name: str) -> Any:
        if self._values[name] is _UNREAD:
            self.touched = True
            for read_name, value in self._read().items():
                if self._values.get(read_name) is _UNREAD:
                    self._values[read_name] = value
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.touched = True
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        self.touched = True
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, name: object) -> bool:  # else the mixin asks for the value
        return name in self._values

    def __len__(self) -> int:
        return len(self._values)

    def copy(self) -> dict[str, Any]:
        """Return a plain dict with every value."""
        return dict(self)

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**other, **self}


class LazyStates(Sequence[Any]):
    """A folder's optimizer states, one an optimizer. The first access to one reads all of them.

    Args:
        count: the number of optimizers in the folder.
        read: returns the states as ``Optimizer.load_state_dict`` takes them.
    """

    def __init__(self, count: int, read: Callable[[], Sequence[Any]]) -> None:
        self._count, self._read = count, read
        self._states: Sequence[Any] | None = None

    @property
    def touched(self) -> bool:
        """Whether a state was read, and may have been changed."""
        return self._states is not None

    def __getitem__(self, index: Any) -> Any:
        if self._states is None:
            self._states = self._read()
        return self._states[index]

    def __len__(self) -> int:
        return self._count
