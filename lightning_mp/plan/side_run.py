"""One batch through a module outside of the training loop, and everything as it was before afterwards."""

import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_mp.compat.lightning import LightningModule, Trainer
from lightning_mp.compat.torch import buffers_of
from lightning_mp.numerics.dtypes import HALF, cast_floating, default_dtype, to_torch
from lightning_mp.numerics.rng import rng_state, set_rng_state
from lightning_mp.plan.skip_aware import Override

#: Trainer arguments of a run of a few steps that is only observed: nothing is validated, saved or shown
BARE: Mapping[str, Any] = {
    "max_epochs": -1,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def step_output(module: nn.Module, batch: Any, batch_idx: int = 0) -> Any:
    """What ``training_step`` of a LightningModule returns for ``batch``, or the forward of any other module.

    A forward gets a mapping as keywords, a tuple or list as arguments.
    """
    if isinstance(module, LightningModule) and type(module).training_step is not LightningModule.training_step:
        with warnings.catch_warnings():  # there is nowhere to log to
            warnings.filterwarnings("ignore", r"You are trying to `self\.log\(\)`")
            return module.training_step(batch, batch_idx)
    if isinstance(batch, Mapping):
        return module(**cast("Mapping[str, Any]", batch))
    return module(*batch) if isinstance(batch, (tuple, list)) else module(batch)


def around_passes(trainer: Trainer, context: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
    """Make each forward and backward pass of the training loop within a ``context()``; returns what undoes it.

    Not each batch, which may never end: a dispatch mode is entered and left in one frame, or it stays behind.
    """
    undo, inside = ExitStack(), list[None]()

    def within(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if inside:  # under manual optimization backward is called in training_step
            return original(*args, **kwargs)
        inside.append(None)
        try:
            with context():
                return original(*args, **kwargs)
        finally:
            inside.clear()

    for name in ("training_step", "backward"):
        undo.callback(Override(trainer.strategy, name, within).remove)
    return undo.close


def loss_of(output: Any) -> Any:
    """``output["loss"]`` of a mapping, else ``output.loss``, else ``output`` itself."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)


def output_in(module: nn.Module, batch: Any, device: torch.device, *, autocast: str | None, storage: str | None) -> Any:
    """:func:`step_output` under autocast to a dtype, else with parameters, default dtype and batch in ``storage``."""
    if autocast is not None:
        with torch.autocast(device.type, to_torch(autocast), cache_enabled=False):
            return step_output(module, batch)
    dtype = None if storage in (None, "fp64") else to_torch(storage)
    if dtype not in HALF:
        return step_output(module, batch)
    with default_dtype(dtype):
        return step_output(module, cast_floating(batch, dtype))


@contextmanager
def untouched(root: nn.Module, device: torch.device) -> Generator[None, None, None]:
    """On exit gradients, what is trained, buffers and attributes of ``root``'s modules, and generators are as before.

    Within there are no gradients at first. Tensors, lists, dicts and sets among attributes are copied, one level deep.
    """
    undo: list[Callable[[], object]] = [partial(set_rng_state, rng_state(device), device)]
    for parameter in root.parameters():
        undo.append(partial(setattr, parameter, "grad", parameter.grad))
        undo.append(partial(parameter.requires_grad_, parameter.requires_grad))
        parameter.grad = None
    for module in root.modules():
        undo.append(_kept(buffers_of(module)))
        undo.append(_kept(module.__dict__, leave=_OF_EVERY_MODULE))
    try:
        yield
    finally:
        for step in undo:
            step()


def _kept(values: dict[str, Any], leave: frozenset[str] = frozenset()) -> Callable[[], None]:
    """A function that restores the entries of ``values``, and the contents of tensors and containers among them."""
    before = {name: (value, _copied(value)) for name, value in values.items() if name not in leave}

    def restore() -> None:
        for name in [name for name in values if name not in before and name not in leave]:
            del values[name]
        for name, (value, copied) in before.items():
            _fill(value, copied)
            values[name] = value

    return restore


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return None if value.is_inference() else value.detach().clone()
    return value.copy() if type(value) in (list, dict, set) else None


def _fill(value: Any, copied: Any) -> None:
    if isinstance(copied, Tensor):
        with torch.no_grad():  # always: batch norm writes its statistics without counting the version up
            value.copy_(copied)
    elif copied is not None:
        value.clear()
        (value.extend if type(value) is list else value.update)(copied)
