"""transformers' private conventions, read from modules without an import of transformers.

Other libraries follow them too.
"""

import re
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from copy import copy
from typing import Any, cast

from torch import nn

from lightning_mp.compat import patched

#: the attribute of a tensor that was initialised or loaded
IS_INITIALIZED = "_is_hf_initialized"


def block_classes(module: nn.Module) -> Iterable[str]:
    """Return the names of the classes of blocks that a model declares as not to be split.

    Empty without a declaration.
    """
    return getattr(module, "_no_split_modules", None) or ()


def kept_in_fp32(module: nn.Module, storage: str) -> list[str]:
    """Return regular expressions for names of tensors that ``from_pretrained`` keeps in fp32.

    ``storage`` is the dtype of the rest: the result is empty for fp32. The strict list counts for
    both half formats, and the other list counts for fp16, as in ``_get_dtype_plan`` of
    ``PreTrainedModel``.
    """
    strict = getattr(module, "_keep_in_fp32_modules_strict", None) if storage in ("bf16", "fp16") else None
    other = getattr(module, "_keep_in_fp32_modules", None) if storage == "fp16" else None
    return sorted({name.replace("*", ".*") for name in (*(strict or ()), *(other or ()))})


#: packages of transformers' own models, and of code that comes with a checkpoint from the hub
_PACKAGES = ("transformers.", "transformers_modules.")
_ROTARY = re.compile("rotary|rope", re.IGNORECASE)


def is_rotary(cls: type[nn.Module]) -> bool:
    """True if the class is a rotary embedding of a transformers model.

    ``from_pretrained`` computes its buffers in fp32. They are in no checkpoint, and ``dtype=`` does
    not change them.
    """
    return any(base.__module__.startswith(_PACKAGES) and _ROTARY.search(base.__name__) for base in cls.__mro__)


def initialiser(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """Return the model's method that initialises the tensors of one of its modules, or ``None``."""
    method = getattr(module, "_init_weights", None)
    return method if callable(method) else None


def checkpointing_function(module: nn.Module) -> Any:
    """Return the function that recomputes the module's blocks, or ``None``.

    transformers sets it if ``gradient_checkpointing`` is enabled.
    """
    return getattr(module, "_gradient_checkpointing_func", None)


def is_cache(value: object) -> bool:
    """True if the value is a key-value cache of transformers, or a layer of one."""
    return any(base.__module__ == "transformers.cache_utils" for base in type(value).__mro__)


def copied_cache(cache: Any) -> Any:
    """Return a copy of ``cache`` with the same tensors. A forward may extend it."""
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
    """Return a tuple with the class of GPT-2's linear layers, empty if nobody has imported it."""
    cls = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return () if cls is None else (cls,)


@contextmanager
def fakes_unnoticed() -> Generator[None, None, None]:
    """Make transformers treat fake tensors as ordinary tensors within the context.

    Otherwise it makes masks that a real run does not make.
    """
    module: Any = sys.modules.get("transformers.utils.import_utils")
    with patched(module, is_fake_tensor=lambda _: False) if hasattr(module, "is_fake_tensor") else nullcontext():
        yield
