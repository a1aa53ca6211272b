"""Functions that run a batch through a module outside of the training loop, and restore state."""

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

#: Trainer arguments for a few observed steps without validation, checkpoints and progress output
BARE: Mapping[str, Any] = {
    "max_epochs": -1,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
#: attributes that every module has, and a LightningModule's references to its run
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_trainer", "_fabric"}


def step_output(module: nn.Module, batch: Any, batch_idx: int = 0) -> Any:
    """Return the output of a LightningModule's ``training_step``, or else of the forward.

    The forward runs for other modules, and if the class does not define ``training_step``. A
    forward gets a mapping as keywords, and a tuple or list as positional arguments.
    """
    if isinstance(module, LightningModule) and type(module).training_step is not LightningModule.training_step:
        with warnings.catch_warnings():  # no Trainer, so no logger
            warnings.filterwarnings("ignore", r"You are trying to `self\.log\(\)`")
            return module.training_step(batch, batch_idx)
    if isinstance(batch, Mapping):
        return module(**cast("Mapping[str, Any]", batch))
    return module(*batch) if isinstance(batch, (tuple, list)) else module(batch)


def around_passes(trainer: Trainer, context: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
    """Run each forward and backward pass of the training loop in a new ``context()``.

    The returned function undoes this.

    A context around a whole batch would not work, because the batch may fail between two hooks. A
    dispatch mode must be entered and left in one frame.
    """
    undo, inside = ExitStack(), list[None]()

    def within(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if inside:  # manual optimization calls backward in training_step
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
    """Return the loss in the output of a step.

    This is ``output["loss"]`` of a mapping, or ``None`` if it has none. For another object it is
    ``output.loss``, or the output itself without such an attribute.
    """
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)


def output_in(module: nn.Module, batch: Any, device: torch.device, *, autocast: str | None, storage: str | None) -> Any:
    """Return :func:`step_output` of a batch in a given precision.

    Args:
        module: the module. It is not cast: its parameters have ``storage`` already.
        batch: the batch.
        device: the device whose autocast is entered.
        autocast: the short name of the dtype to autocast to. ``None`` runs without autocast.
        storage: a half dtype for the batch and as the default dtype, used without autocast. Other
            dtypes, and ``None``, change nothing.
    """
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
    """Drop all gradients of ``root``. On exit restore its state, except the values of parameters.

    Restored are gradients, ``requires_grad``, buffers and attributes of all modules, and the random
    generators. Contents of attributes are restored as far as
    :class:`~lightning_mp.numerics.contents.Contents` notes them. If restoring a value raises, the
    others are still restored, and the error is raised at the end.
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
