"""The one door to Lightning, which has two names: ``lightning.pytorch`` and ``pytorch_lightning``.

A Trainer of one copy takes nothing that is made of the other: all that is used of Lightning is imported from here, from
the copy that the program imported first.
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
#: where names are looked for, below the Trainer package and below the Fabric package
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
    """The copy that was imported first when this was first asked; where none was, one that is installed."""
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
    """Raise a PlanError where a Trainer or a LightningModule is made of the copy that this process does not use."""
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
    """The ``_AcceleratorConnector`` of a Trainer being made, among the callers, and the locals of its function."""
    frame: Any = inspect.currentframe()
    for _ in range(8):  # a property and a builder lie between
        owner = frame.f_locals.get("self") if frame else None
        if type(owner).__name__ == "_AcceleratorConnector" and frame.f_code.co_name in functions:
            return owner, frame.f_locals
        frame = frame and frame.f_back
    return None, {}


def precision_word(plugin: Precision) -> Any:
    """The ``precision=`` of the Trainer being made; ``None`` where ``plugin`` came by ``plugins=``, or none is made.

    On a CPU Lightning makes a bf16 plugin of ``"16-mixed"``: only the Trainer's own argument has the word.
    """
    connector, given = _connector_that_calls("__init__")
    if connector is None or connector._precision_plugin_flag is plugin:
        return None
    return given["precision"] or "32-true"


def give_new_trainer(strategy: Strategy | None) -> bool:
    """Whether a Trainer being made reads what its ``strategy=`` holds; if so it uses ``strategy``, unless ``None``."""
    connector, _ = _connector_that_calls("_check_config_and_set_final_flags")
    if connector is not None and strategy is not None:
        connector._strategy_flag = strategy
    return connector is not None


def trainer_of(module: Any) -> Trainer | None:
    """The Trainer that the module, any ``nn.Module``, is attached to, if any."""
    return getattr(module, "_trainer", None)


def attached_to(module: Any) -> list[Any]:
    """The Trainer and the Fabric that a LightningModule belongs to."""
    return [owner for owner in (vars(module).get(name) for name in ("_trainer", "_fabric")) if owner is not None]


def hyperparameters_argument(owner: Any) -> str | None:
    """Return the argument of a module or data module that holds its saved hyperparameters, if it is one argument."""
    return getattr(owner, "_hparams_name", None)


def is_compiled(module: Any) -> bool:
    """Whether Lightning was given ``torch.compile(module)``, which it takes apart again."""
    return vars(module).get("_compiler_ctx") is not None


def accumulates(trainer: Any) -> bool:
    """Whether the batch at hand is not the last one before an optimizer step."""
    return trainer.fit_loop._should_accumulate()


def begins_window(trainer: Trainer, batch_idx: int) -> bool:
    """Whether Lightning sets gradients to zero for this batch: what an epoch that was left out left is over then."""
    automatic = trainer.lightning_module.automatic_optimization
    return automatic and batch_idx % trainer.accumulate_grad_batches == 0


def step_inputs(trainer: Any, batch: Any, batch_idx: int) -> list[Any]:
    """The arguments that ``training_step`` takes for a batch."""
    return list(trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx).values())


def draws_batches_itself(trainer: Any) -> bool:
    """Whether ``training_step`` takes the data loader's iterator."""
    return isinstance(trainer.fit_loop._data_fetcher, __getattr__("DataLoaderIterDataFetcher"))


#: of a Trainer, the step at which it logs the batch at hand
logged_step = attrgetter("fit_loop.epoch_loop._batches_that_stepped")
#: of a ModelParallelStrategy, its device mesh; ``None`` before it has laid one
mesh_of = attrgetter("_device_mesh")


def finish_saving(strategy: Any) -> None:
    """Wait until a checkpoint that is written while training goes on is whole, and older ones are removed.

    Every rank calls it. Raises whatever ended the save.
    """
    finish: Any = getattr(strategy, "finish_saving", None)  # this package's strategies
    if finish is not None:
        finish()
    checkpoint_io = strategy.checkpoint_io
    if isinstance(checkpoint_io, __getattr__("AsyncCheckpointIO")):
        checkpoint_io.teardown()  # the next save starts its thread anew
        strategy.barrier()


@contextmanager
def checkpoint_connector(trainer: Any) -> Generator[Any, None, None]:
    """What restores a run from a checkpoint; afterwards the Trainer's own ``ckpt_path`` is as before."""
    connector = trainer._checkpoint_connector
    with patched(connector, _ckpt_path=connector._ckpt_path):
        yield connector


def parsed_optimizers(given: Any) -> tuple[list[Any], list[Any]]:
    """The optimizers of what ``configure_optimizers`` returned, and its schedules as Lightning keeps them."""
    optimizers, schedules, monitor = __getattr__("configure_optimizers")(given)
    return optimizers, __getattr__("configure_schedulers_automatic_opt")(schedules, monitor)


def is_stand_in(optimizer: Any) -> bool:
    """True if ``configure_optimizers`` returned None, for which Lightning makes an optimizer that does nothing."""
    return isinstance(optimizer, __getattr__("MockOptimizer"))


def keep_sampler(trainer: Any) -> None:
    """Have the Trainer leave the user's own sampler in place of a ``DistributedSampler``."""
    trainer._accelerator_connector.use_distributed_sampler = False


def ddp_hooks(strategy: Any) -> tuple[Any, Any]:
    """The communication hook that ``DDPStrategy`` was given, and the wrapper around it, if any."""
    return getattr(strategy, "_ddp_comm_hook", None), getattr(strategy, "_ddp_comm_wrapper", None)


def validates(trainer: Any) -> bool:
    """Whether the fit at hand has data to validate on."""
    return trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined()


def layer_sync_of(strategy: Any) -> Any:
    """What ``sync_batchnorm=True``, or a plugin, put there to synchronize layers over ranks; ``None`` where nothing."""
    return getattr(strategy, "given_layer_sync", None) or getattr(strategy, "_layer_sync", None)


def set_dtype(module: Any, dtype: Any, *, kept: Any = None) -> None:
    """Make ``dtype`` what ``module.dtype`` reads, as ``module.to(dtype)`` does.

    Nothing changes if the module is no LightningModule, or if its dtype is ``kept``.
    """
    if isinstance(module, __getattr__("DeviceDtypeModuleMixin")) and module.dtype != kept:
        module._dtype = dtype


def set_mesh(module: Any, mesh: Any) -> None:
    """Make ``mesh`` the module's ``device_mesh``."""
    module._device_mesh = mesh


# ------------------------------------------------------------------ what a Trainer prints


@contextmanager
def tidy_output(trainer: Any) -> Generator[None, None, None]:
    """Within, what says nothing under a plan is left out.

    The model summary warns that it cannot size a mixed precision (``ModelSummary.__init__``), and the rich bar of a run
    without a limit of epochs counts them up to -2 (``RichProgressBar._get_train_description``).
    """
    warnings.filterwarnings("ignore", message="Precision .* is not supported by the model summary")
    added, bar = warnings.filters[0], trainer.progress_bar_callback
    described = getattr(bar, "_get_train_description", None) if trainer.max_epochs == -1 else None
    if described is not None:
        bar._get_train_description = lambda epoch: described(epoch).replace("/-2", "")
    yield
    if described is not None:
        del bar._get_train_description
    with suppress(ValueError):  # whoever set filters of its own has dropped it
        cast("list[Any]", warnings.filters).remove(added)
