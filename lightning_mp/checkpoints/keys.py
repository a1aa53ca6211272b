"""The keys of a checkpoint: names of weights without wrappers, and ONE way to number the state of an optimizer.

An optimizer's state belongs to its parameters in the order of its groups. Each format keys it in its own way (by place,
by name); from one to another it goes by that order alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.modules.patterns import plain_name
from lightning_mp.numerics.grads import parameters_of


def plain_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` under names without wrappers (``_orig_mod.`` and the like), in its order."""
    return {plain_name(name): value for name, value in state.items()}


def rekeyed(state: Mapping[str, Any], keys: Iterable[Any] | None = None) -> dict[str, Any]:
    """An optimizer's ``state_dict`` with its parameters called ``keys``, in the order of its groups; else by place."""
    old = [_plain(key) for group in state["param_groups"] for key in group["params"]]
    new = dict(zip(old, range(len(old)) if keys is None else keys, strict=True))
    return {
        # absent where the optimizer keeps none
        "state": {new[_plain(key)]: values for key, values in state.get("state", {}).items()},
        "param_groups": [
            {**group, "params": [new[_plain(key)] for key in group["params"]]} for group in state["param_groups"]
        ],
    }


def by_parameter(
    state: Mapping[str, Any], optimizer: Optimizer, value: Callable[[Tensor | None, Any], Any]
) -> dict[str, Any]:
    """``state`` with each entry replaced by ``value(parameter, entry)``; without those of which that is None.

    Groups of other sizes are refused by the optimizer itself: what has no parameter here is given None.
    """
    keys = [key for group in state["param_groups"] for key in group["params"]]
    own = dict(zip(keys, parameters_of(optimizer), strict=False))
    found = {key: value(own.get(key), entry) for key, entry in state["state"].items()}
    return {**state, "state": {key: entry for key, entry in found.items() if entry is not None}}


def _plain(key: Any) -> Any:
    return plain_name(key) if isinstance(key, str) else key
