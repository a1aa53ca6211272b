"""transformers' private conventions, which other libraries follow too: looked for on modules, never imported."""

import re
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from copy import copy
from typing import Any, cast

from torch import nn

from lightning_mp.compat import patched

#: set on a tensor that was initialised or loaded
IS_INITIALIZED = "_is_hf_initialized"


def block_classes(module: nn.Module) -> Iterable[str]:
    """Names of the classes of blocks that a model names as not to be split."""
    return getattr(module, "_no_split_modules", None) or ()


def kept_in_fp32(module: nn.Module, storage: str) -> list[str]:
    """Regular expressions, searched for in the names of a model's tensors that ``from_pretrained`` keeps in fp32.

    As in ``PreTrainedModel._get_dtype_plan``, the list that is not strict counts where the rest is fp16 alone.
    """
    strict = getattr(module, "_keep_in_fp32_modules_strict", None) if storage in ("bf16", "fp16") else None
    other = getattr(module, "_keep_in_fp32_modules", None) if storage == "fp16" else None
    return sorted({name.replace("*", ".*") for name in (*(strict or ()), *(other or ()))})


#: where transformers' own models are, and the code that comes with a checkpoint of the hub
_PACKAGES = ("transformers.", "transformers_modules.")
_ROTARY = re.compile("rotary|rope", re.IGNORECASE)


def is_rotary(cls: type[nn.Module]) -> bool:
    """Whether the class is a rotary embedding of a transformers model.

    ``from_pretrained`` computes the buffers in fp32: no checkpoint has them, and its ``dtype=`` changes none of them.
    """
    return any(base.__module__.startswith(_PACKAGES) and _ROTARY.search(base.__name__) for base in cls.__mro__)


def initialiser(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """What initialises the tensors of a module within this model, if the model has it."""
    method = getattr(module, "_init_weights", None)
    return method if callable(method) else None


def checkpointing_function(module: nn.Module) -> Any:
    """What runs the module's blocks where ``gradient_checkpointing`` is on."""
    return getattr(module, "_gradient_checkpointing_func", None)


def is_cache(value: object) -> bool:
    """Whether it is a key-value cache of transformers, or a layer of one."""
    return any(base.__module__ == "transformers.cache_utils" for base in type(value).__mro__)


def copied_cache(cache: Any) -> Any:
    """Return a cache with the same tensors, to which a forward can add without changing ``cache``."""
    copied = copy(cache)
    for name, value in vars(cache).items():
        if is_cache(value):
            setattr(copied, name, copied_cache(value))
        elif isinstance(value, list):
            layers = cast("list[Any]", value)
            setattr(copied, name, [copied_cache(layer) if is_cache(layer) else layer for layer in layers])
        elif isinstance(value, dict):
            setattr(copied, name, dict(cast("dict[Any, Any]", value)))
    return copied


def conv1d() -> tuple[type[nn.Module], ...]:
    """The class of GPT-2's linear layers, if anything has imported it."""
    cls = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return () if cls is None else (cls,)


@contextmanager
def fakes_unnoticed() -> Generator[None, None, None]:
    """Within, transformers takes tensors without memory for ordinary ones; else it makes masks that no run makes."""
    module: Any = sys.modules.get("transformers.utils.import_utils")
    with patched(module, is_fake_tensor=lambda _: False) if hasattr(module, "is_fake_tensor") else nullcontext():
        yield
