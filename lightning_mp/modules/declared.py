"""Tensors that a model itself keeps in fp32 where the rest is half precision: transformers' lists of them.

They are stored in fp32 and no more: the model's own code casts around them, as after ``from_pretrained``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_mp.compat.transformers import kept_in_fp32
from lightning_mp.modules.patterns import original_class, plain_name
from lightning_mp.numerics.dtypes import uncastable


@dataclass(frozen=True, slots=True)
class Declared:
    """A parameter or buffer by its module, the entry of the list that means it, and the class that has the list."""

    name: str
    module: nn.Module
    key: str
    pattern: str
    model: str

    @property
    def tensor(self) -> Tensor:
        """The tensor as it is now; sharding puts another in its place."""
        return getattr(self.module, self.key)


def find(root: nn.Module, storage: str, pinned: Iterable[nn.Module]) -> tuple[Declared, ...]:
    """What models below ``root`` keep in fp32 where ``storage`` is ``"bf16"`` or ``"fp16"``, less the ``pinned``.

    The outermost model's lists count: it has taken over those of the models inside, and names are relative to it.
    """
    taken, inside, found = _ids(pinned), set[int](), list[Declared]()
    for prefix, model in root.named_modules():
        patterns = () if id(model) in inside else kept_in_fp32(model, storage)
        if not patterns:
            continue
        inside.update(map(id, model.modules()))
        for name, module in model.named_modules():
            left = uncastable(module)
            for key, tensor in _own(module):
                pattern = next((one for one in patterns if re.search(one, f"{name}.{key}".strip("."))), None)
                if pattern and tensor.is_floating_point() and id(tensor) not in left and id(tensor) not in taken:
                    place = f"{prefix}.{name}".strip(".")
                    found.append(Declared(place, module, key, pattern, original_class(model).__name__))
    return tuple(found)


def fp32_names(root: nn.Module, pinned: Mapping[nn.Module, str]) -> dict[str, list[str]]:
    """By half format, names of tensors of modules ``pinned`` to fp32 and of what ``find`` finds, wrappers left out."""
    fp32 = _ids(module for module, dtype in pinned.items() if dtype == "fp32")
    listed = {half: {id(one.tensor) for one in find(root, half, pinned)} | fp32 for half in ("bf16", "fp16")}
    owned = [
        (plain_name(f"{name}.{key}".strip(".")), id(tensor))
        for name, module in root.named_modules(remove_duplicate=False)
        for key, tensor in _own(module)
    ]
    return {half: [name for name, key in owned if key in kept] for half, kept in listed.items() if kept}


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _ids(modules: Iterable[nn.Module]) -> set[int]:
    return {id(tensor) for module in modules for _, tensor in _own(module)}
