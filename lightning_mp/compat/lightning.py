"""All names from Lightning that this package uses: ``lightning.pytorch`` or ``pytorch_lightning``.

A Trainer of one of these two copies rejects objects of the other. So this package imports Lightning
only from here, and this module uses the copy that the program imported first.
"""

# pyright: reportWildcardImportFromLibrary=false
# ruff: noqa: F403, F405
from __future__ import annotations

import inspect
import sys
import warnings
from collections import OrderedDict
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

from lightning_mp.compat import patched
from lightning_mp.errors import PlanError

if TYPE_CHECKING:
    from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout as default_pg_timeout
    from lightning.fabric.utilities.apply_func import move_data_to_device as move_data_to_device
    from lightning.fabric.utilities.cloud_io import get_filesystem as get_filesystem
    from lightning.fabric.utilities.seed import reset_seed as reset_seed
    from lightning.pytorch import *
    from lightning.pytorch.callbacks import *
    from lightning.pytorch.core.optimizer import LightningOptimizer as LightningOptimizer
    from lightning.pytorch.loggers import *
    from lightning.pytorch.loggers.logger import DummyLogger as DummyLogger
    from lightning.pytorch.plugins import *
    from lightning.pytorch.plugins.environments import *
    from lightning.pytorch.strategies import *
    from lightning.pytorch.strategies.deepspeed import remove_module_hooks as remove_module_hooks
    from lightning.pytorch.trainer.states import *
    from lightning.pytorch.utilities import *
    from lightning.pytorch.utilities.exceptions import MisconfigurationException as MisconfigurationException
    from lightning.pytorch.utilities.model_helpers import is_overridden as is_overridden

#: the Trainer package of each copy, and its Fabric package
COPIES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
# The modules in which names are searched, below the Trainer package and below the Fabric package.
_TRAINER_MODULES = (
    *("callbacks", "core.optimizer", "loggers", "loggers.logger", "loops.fetchers", "plugins"),
    *("plugins.io", "plugins.environments", "plugins.precision", "strategies", "strategies.deepspeed"),
    *("strategies.launchers", "strategies.strategy", "trainer.states", "utilities", "utilities.exceptions"),
    "utilities.model_helpers",
)
_FABRIC_MODULES = (
    *("plugins.collectives.torch_collective", "strategies.fsdp", "utilities.apply_func", "utilities.cloud_io"),
    *("utilities.device_dtype_mixin", "utilities.optimizer", "utilities.seed"),
)


@cache
def host() -> str:
    """Return the copy of Lightning that was imported first, by its package name.

    If neither was imported, it is an installed one, ``lightning.pytorch`` by preference. The first
    call decides.
    """
    imported = (name for name, module in [*sys.modules.items()] if name in COPIES and module)
    return next(imported, "lightning.pytorch" if find_spec("lightning") else "pytorch_lightning")


def __getattr__(name: str) -> Any:
    places = [f"{host()}.{below}" for below in _TRAINER_MODULES]
    places += [f"{COPIES[host()]}.{below}" for below in _FABRIC_MODULES]
    for spelled in () if name.startswith("_") else (name, f"_{name}"):
        for module in map(import_module, [host(), *places]):
            if hasattr(module, spelled):
                return globals().setdefault(name, getattr(module, spelled))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ------------------------------------------------------------------ a program that imports both copies


def check_copy(thing: object, subject: str) -> None:
    """Raise a PlanError of ``subject`` if ``thing`` is made of the copy that is not in use.

    ``thing`` is a Trainer or a LightningModule. Its class or a base class is of that copy.
    """
    copy = host()
    other = next(name for name in COPIES if name != copy)
    if any(cls.__module__.startswith(f"{other}.") for cls in type(thing).__mro__):
        raise PlanError.of(
            f"a {type(thing).__name__} of {other} where lightning_mp uses {copy}, imported first",
            f"write 'import {copy} as pl' throughout, or 'import {other}' before every other import",
            subject,
        )


# ------------------------------------------------------------------ private names


def _connector_that_calls(*functions: str) -> tuple[Any, Mapping[str, Any]]:
    """Return the ``_AcceleratorConnector`` among the callers, and the locals of its function.

    A Trainer is then being constructed. The function is one of ``functions``. Without such a caller
    the result is ``(None, {})``.
    """
    frame: Any = inspect.currentframe()
    for _ in range(8):  # a property and a builder are in between
        owner = frame.f_locals.get("self") if frame else None
        if type(owner).__name__ == "_AcceleratorConnector" and frame.f_code.co_name in functions:
            return owner, frame.f_locals
        frame = frame and frame.f_back
    return None, {}


def precision_word(plugin: Precision) -> Any:
    """Return the ``precision=`` of the Trainer that is being constructed, ``"32-true"`` by default.

    ``None`` if no Trainer is being constructed, or if ``plugin`` came from its ``plugins=``. On a
    CPU Lightning makes a bf16 plugin for ``"16-mixed"``, so only the argument has the user's word.
    """
    connector, given = _connector_that_calls("__init__")
    if connector is None or connector._precision_plugin_flag is plugin:
        return None
    return given["precision"] or "32-true"


def give_new_trainer(strategy: Strategy | None) -> bool:
    """True if a Trainer is being constructed and reads its ``strategy=``.

    The Trainer then uses ``strategy`` instead. With ``None`` it keeps its own.
    """
    connector, _ = _connector_that_calls("_check_config_and_set_final_flags")
    if connector is not None and strategy is not None:
        connector._strategy_flag = strategy
    return connector is not None


def trainer_of(module: Any) -> Trainer | None:
    """Return the Trainer to which an ``nn.Module`` is attached, or ``None``."""
    return getattr(module, "_trainer", None)


def attached_to(module: Any) -> list[Any]:
    """Return the Trainer and the Fabric of a LightningModule, as a list of those that it has."""
    return [owner for owner in (vars(module).get(name) for name in ("_trainer", "_fabric")) if owner is not None]


def hyperparameters_argument(owner: Any) -> str | None:
    """Return the name of the argument that holds all saved hyperparameters, or ``None``.

    It is an argument of the constructor of ``owner``, a module or data module.
    """
    return getattr(owner, "_hparams_name", None)


def is_compiled(module: Any) -> bool:
    """True if Lightning was given ``torch.compile(module)``, from which it takes the module."""
    return vars(module).get("_compiler_ctx") is not None


def accumulates(trainer: Any) -> bool:
    """True if no optimizer step follows the present batch, because gradients accumulate."""
    return trainer.fit_loop._should_accumulate()


def begins_window(trainer: Trainer, batch_idx: int) -> bool:
    """True if Lightning sets gradients to zero before this batch, the first of its window.

    Always False under manual optimization. Gradients of an epoch that stopped within a window are
    then dropped.
    """
    automatic = trainer.lightning_module.automatic_optimization
    return automatic and batch_idx % trainer.accumulate_grad_batches == 0


def step_inputs(trainer: Any, batch: Any, batch_idx: int) -> list[Any]:
    """Return the arguments that Lightning passes to ``training_step`` for a batch."""
    return list(trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx).values())


def draws_batches_itself(trainer: Any) -> bool:
    """True if ``training_step`` takes the data loader's iterator instead of a batch."""
    return isinstance(trainer.fit_loop._data_fetcher, __getattr__("DataLoaderIterDataFetcher"))


#: the step number under which a Trainer logs the present batch
logged_step = attrgetter("fit_loop.epoch_loop._batches_that_stepped")
#: the device mesh of a ModelParallelStrategy; ``None`` before it has created one
mesh_of = attrgetter("_device_mesh")


def finish_saving(strategy: Any) -> None:
    """Wait until an asynchronous checkpoint is complete, and older ones are removed.

    A collective: every rank must call it. An error of the save is raised here.
    """
    finish: Any = getattr(strategy, "finish_saving", None)  # strategies of this package have it
    if finish is not None:
        finish()
    checkpoint_io = strategy.checkpoint_io
    if isinstance(checkpoint_io, __getattr__("AsyncCheckpointIO")):
        checkpoint_io.teardown()  # the next save starts a new thread
        strategy.barrier()


@contextmanager
def checkpoint_connector(trainer: Any) -> Generator[Any, None, None]:
    """Return the Trainer's object that restores a run from a checkpoint, within a context.

    At its end the Trainer's own ``ckpt_path`` is restored, also after an error.
    """
    connector = trainer._checkpoint_connector
    with patched(connector, _ckpt_path=connector._ckpt_path):
        yield connector


def parsed_optimizers(given: Any) -> tuple[list[Any], list[Any]]:
    """Return (optimizers, scheduler configs) of a return value of ``configure_optimizers``.

    Lightning parses it as for automatic optimization.
    """
    optimizers, schedules, monitor = __getattr__("configure_optimizers")(given)
    return optimizers, __getattr__("configure_schedulers_automatic_opt")(schedules, monitor)


def is_stand_in(optimizer: Any) -> bool:
    """True if the optimizer does nothing.

    Lightning makes such an optimizer if ``configure_optimizers`` returns None.
    """
    return isinstance(optimizer, __getattr__("MockOptimizer"))


def keep_sampler(trainer: Any) -> None:
    """Make the Trainer keep the user's sampler instead of using a ``DistributedSampler``."""
    trainer._accelerator_connector.use_distributed_sampler = False


def ddp_hooks(strategy: Any) -> tuple[Any, Any]:
    """Return the communication hook of a ``DDPStrategy`` and its wrapper. Each may be ``None``."""
    return getattr(strategy, "_ddp_comm_hook", None), getattr(strategy, "_ddp_comm_wrapper", None)


def validates(trainer: Any) -> bool:
    """True if the present fit has validation data."""
    return trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined()


def layer_sync_of(strategy: Any) -> Any:
    """Return the strategy's LayerSync, from ``sync_batchnorm=True`` or a plugin, or ``None``.

    A strategy of this package may hold it in ``given_layer_sync``.
    """
    return getattr(strategy, "given_layer_sync", None) or getattr(strategy, "_layer_sync", None)


def set_dtype(module: Any, dtype: Any, *, kept: Any = None) -> None:
    """Set ``module.dtype`` as ``module.to(dtype)`` does, without a cast.

    Nothing changes if the module is no LightningModule (``DeviceDtypeModuleMixin``), or if its
    dtype is ``kept``.
    """
    if isinstance(module, __getattr__("DeviceDtypeModuleMixin")) and module.dtype != kept:
        module._dtype = dtype


def set_mesh(module: Any, mesh: Any) -> None:
    """Set the module's ``device_mesh``."""
    module._device_mesh = mesh


# ------------------------------------------------------------------ output of a Trainer


@contextmanager
def tidy_output(trainer: Any) -> Generator[None, None, None]:
    """Hide two outputs of Lightning that are useless under a plan, and show them again at the end.

    The model summary warns that it does not support a precision (``ModelSummary.__init__``). The
    rich progress bar of a run without a limit of epochs shows "/-2"
    (``RichProgressBar._get_train_description``). An error in the block leaves both hidden.
    """
    warnings.filterwarnings("ignore", message="Precision .* is not supported by the model summary")
    added, bar = warnings.filters[0], trainer.progress_bar_callback
    described = getattr(bar, "_get_train_description", None) if trainer.max_epochs == -1 else None
    if described is not None:
        bar._get_train_description = lambda epoch: described(epoch).replace("/-2", "")
    yield
    if described is not None:
        del bar._get_train_description
    with suppress(ValueError):  # other code has reset the filters meanwhile
        cast("list[Any]", warnings.filters).remove(added)
