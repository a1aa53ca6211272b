"""How many bytes cross between ranks in a step."""

from typing import Any

from lightning.pytorch import Callback
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: flags, norms and counts: no parameter or gradient of a test's model is as small
SMALL = 64


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[int]] = {"gathered": [], "reduced": []}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place, _, name = str(func).partition(".")
        if place == "c10d":
            sizes = [leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            # the whole, beside the rank's part of it; a list of all parts, and the rank's once more
            size = sum(sizes[:-1]) if name.startswith("allgather_.") else max(sizes, default=0)
            what = "gathered" if "allgather" in name else "reduced" if "reduce" in name else None
            if what is not None and size > SMALL:
                self.seen[what].append(size)
        return func(*args, **(kwargs or {}))


class Moved(Callback):
    """Bytes that each step gathers and reduces, collective by collective, whoever calls them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, list[int]]] = []
        self._calls: _Calls | None = None

    def on_train_batch_start(self, *_: Any) -> None:
        self._calls = _Calls()
        self._calls.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        assert self._calls is not None
        self._calls.__exit__(None, None, None)
        self.steps.append(self._calls.seen)
