"""One batch through a module outside of the training loop, and everything as it was before afterwards."""

import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn

from lightning_mp.compat.lightning import LightningModule, Trainer
from lightning_mp.compat.torch import attention_calls_its_modules, buffers_of
from lightning_mp.numerics.contents import Contents, package_of
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
#: attributes that every module has, and that of a LightningModule which refers to the run around it
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_trainer", "_fabric"}


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
        with attention_calls_its_modules(), torch.autocast(device.type, to_torch(autocast), cache_enabled=False):
            return step_output(module, batch)
    dtype = None if storage in (None, "fp64") else to_torch(storage)
    if dtype not in HALF:
        return step_output(module, batch)
    with default_dtype(dtype):
        return step_output(module, cast_floating(batch, dtype))


@contextmanager
def untouched(root: nn.Module, device: torch.device) -> Generator[None, None, None]:
    """On exit restore gradients, ``requires_grad``, buffers and attributes of ``root``'s modules, and generators.

    Within, no parameter has a gradient at first. Attributes are restored with what they contain
    (:class:`~lightning_mp.numerics.contents.Contents`). The values of parameters are not.

    Raises whatever the restoring of a value raised, after all others are restored.
    """
    contents = Contents()
    with ExitStack() as undo:
        undo.callback(set_rng_state, rng_state(device), device)
        for parameter in root.parameters():
            undo.callback(setattr, parameter, "grad", parameter.grad)
            undo.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.grad = None
        undo.callback(contents.restore)
        for module in root.modules():
            contents.note_entries(buffers_of(module))
            contents.note_entries(vars(module), leave=_OF_EVERY_MODULE, package=package_of(module))
        yield
