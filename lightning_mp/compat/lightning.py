"""The one door to Lightning, which has two names: ``lightning.pytorch`` and ``pytorch_lightning``.

They are two copies of the same classes, and a Trainer of one takes nothing that is made of the other. Everything this
package uses of Lightning is therefore imported from here, from the copy that the program has imported.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from lightning_mp.compat.checks import PrivateNames
from lightning_mp.compat.host import COPIES, host

if TYPE_CHECKING:
    from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout as default_pg_timeout
    from lightning.fabric.utilities.apply_func import move_data_to_device as move_data_to_device
    from lightning.fabric.utilities.cloud_io import get_filesystem as get_filesystem
    from lightning.fabric.utilities.seed import reset_seed as reset_seed
    from lightning.pytorch import Callback as Callback
    from lightning.pytorch import LightningDataModule as LightningDataModule
    from lightning.pytorch import LightningModule as LightningModule
    from lightning.pytorch import Trainer as Trainer
    from lightning.pytorch import callbacks as callbacks
    from lightning.pytorch import seed_everything as seed_everything
    from lightning.pytorch.callbacks import Checkpoint as Checkpoint
    from lightning.pytorch.callbacks import ModelCheckpoint as ModelCheckpoint
    from lightning.pytorch.callbacks import WeightAveraging as WeightAveraging
    from lightning.pytorch.core.optimizer import LightningOptimizer as LightningOptimizer
    from lightning.pytorch.loggers.logger import DummyLogger as DummyLogger
    from lightning.pytorch.plugins import Precision as Precision
    from lightning.pytorch.plugins import TorchSyncBatchNorm as TorchSyncBatchNorm
    from lightning.pytorch.plugins.environments import LightningEnvironment as LightningEnvironment
    from lightning.pytorch.plugins.precision import DeepSpeedPrecision as DeepSpeedPrecision
    from lightning.pytorch.plugins.precision import DoublePrecision as DoublePrecision
    from lightning.pytorch.plugins.precision import FSDPPrecision as FSDPPrecision
    from lightning.pytorch.plugins.precision import HalfPrecision as HalfPrecision
    from lightning.pytorch.plugins.precision import MixedPrecision as MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy as DDPStrategy
    from lightning.pytorch.strategies import DeepSpeedStrategy as DeepSpeedStrategy
    from lightning.pytorch.strategies import FSDPStrategy as FSDPStrategy
    from lightning.pytorch.strategies import ModelParallelStrategy as ModelParallelStrategy
    from lightning.pytorch.strategies import ParallelStrategy as ParallelStrategy
    from lightning.pytorch.strategies import SingleDeviceStrategy as SingleDeviceStrategy
    from lightning.pytorch.strategies import Strategy as Strategy
    from lightning.pytorch.strategies import StrategyRegistry as StrategyRegistry
    from lightning.pytorch.strategies.deepspeed import remove_module_hooks as remove_module_hooks
    from lightning.pytorch.trainer.states import RunningStage as RunningStage
    from lightning.pytorch.trainer.states import TrainerFn as TrainerFn
    from lightning.pytorch.utilities import rank_zero_info as rank_zero_info
    from lightning.pytorch.utilities import rank_zero_only as rank_zero_only
    from lightning.pytorch.utilities import rank_zero_warn as rank_zero_warn
    from lightning.pytorch.utilities.exceptions import MisconfigurationException as MisconfigurationException
    from lightning.pytorch.utilities.model_helpers import is_overridden as is_overridden

#: where a name is, below the Trainer package
_PLACES = {
    "Callback": "",
    "LightningDataModule": "",
    "LightningModule": "",
    "Trainer": "",
    "callbacks": "",
    "seed_everything": "",
    "Checkpoint": "callbacks",
    "ModelCheckpoint": "callbacks",
    "WeightAveraging": "callbacks",
    "LightningOptimizer": "core.optimizer",
    "DummyLogger": "loggers.logger",
    "EvaluationLoop": "loops",
    "FitLoop": "loops",
    "TrainingEpochLoop": "loops",
    "DataLoaderIterDataFetcher": "loops.fetchers",
    "Precision": "plugins",
    "TorchCheckpointIO": "plugins.io",
    "TorchSyncBatchNorm": "plugins",
    "LightningEnvironment": "plugins.environments",
    "DeepSpeedPrecision": "plugins.precision",
    "DoublePrecision": "plugins.precision",
    "FSDPPrecision": "plugins.precision",
    "HalfPrecision": "plugins.precision",
    "MixedPrecision": "plugins.precision",
    "DDPStrategy": "strategies",
    "DeepSpeedStrategy": "strategies",
    "FSDPStrategy": "strategies",
    "ModelParallelStrategy": "strategies",
    "ParallelStrategy": "strategies",
    "SingleDeviceStrategy": "strategies",
    "Strategy": "strategies",
    "StrategyRegistry": "strategies",
    "remove_module_hooks": "strategies.deepspeed",
    "SubprocessScriptLauncher": "strategies.launchers",
    "ForwardRedirection": "strategies.strategy",
    "AcceleratorConnector": "trainer.connectors.accelerator_connector",
    "CheckpointConnector": "trainer.connectors.checkpoint_connector",
    "RunningStage": "trainer.states",
    "TrainerFn": "trainer.states",
    "rank_zero_info": "utilities",
    "rank_zero_only": "utilities",
    "rank_zero_warn": "utilities",
    "MisconfigurationException": "utilities.exceptions",
    "is_overridden": "utilities.model_helpers",
}

#: where a name is, below the Fabric package
_FABRIC_PLACES = {
    "default_pg_timeout": "plugins.collectives.torch_collective",
    "move_torchmetrics_to_device": "strategies.fsdp",
    "move_data_to_device": "utilities.apply_func",
    "get_filesystem": "utilities.cloud_io",
    "optimizers_to_device": "utilities.optimizer",
    "reset_seed": "utilities.seed",
}


#: names that are private there
_PRIVATE = frozenset(
    {
        "AcceleratorConnector",
        "CheckpointConnector",
        "DataLoaderIterDataFetcher",
        "EvaluationLoop",
        "FitLoop",
        "ForwardRedirection",
        "SubprocessScriptLauncher",
        "TrainingEpochLoop",
        "move_torchmetrics_to_device",
        "optimizers_to_device",
    }
)


def of_copy(copy: str, name: str) -> Any:
    """``name`` of one of the two copies."""
    package, below = (copy, _PLACES[name]) if name in _PLACES else (COPIES[copy], _FABRIC_PLACES[name])
    module = import_module(f"{package}.{below}" if below else package)
    return getattr(module, f"_{name}" if name in _PRIVATE else name)


def __getattr__(name: str) -> Any:
    if name not in _PLACES and name not in _FABRIC_PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return of_copy(host(), name)


# ------------------------------------------------------------------ private names
# What a class of this package overrides, or calls on itself, stands here too: the host may rename either.


class _Names(PrivateNames):
    """Private names of the copy of Lightning that this process uses, by the classes that this module hands out."""

    def _owner(self, place: str) -> Any:
        try:
            return getattr(sys.modules[__name__], place)
        except (AttributeError, ImportError):
            return None


PLAN = _Names(
    "lightning",
    {
        "DDPStrategy()": ("_ddp_comm_hook", "_ddp_comm_wrapper"),
        "FSDPPrecision()": ("_desired_input_dtype",),
        "LightningModule()": ("_compiler_ctx", "_trainer"),
        "ModelParallelStrategy()": ("_device_mesh",),
        "ParallelStrategy()": ("_layer_sync",),
        "Precision": ("_after_closure", "_wrap_closure"),
    },
)
MONITORS = _Names(
    "lightning",
    {
        "CheckpointConnector()": ("_ckpt_path",),
        "FitLoop": ("_should_accumulate",),
        "FitLoop()": ("_data_fetcher",),
        "ModelCheckpoint()": ("_last_checkpoint_saved",),
        "Trainer()": ("_checkpoint_connector",),
        "TrainingEpochLoop": ("_build_kwargs",),
        "TrainingEpochLoop()": ("_batches_that_stepped",),
    },
)
DDP = _Names(
    "lightning",
    {
        "DDPStrategy": ("_configure_launcher", "_setup_model"),
        "Trainer()": ("_accelerator_connector",),
    },
)
FSDP1 = _Names(
    "lightning",
    {
        "FSDPStrategy": ("_setup_model",),
        "FSDPStrategy()": ("_state_dict_type",),
    },
)
FSDP2 = _Names(
    "lightning",
    {
        "LightningModule()": ("_device_mesh",),
        "ModelParallelStrategy": ("_setup_distributed",),
        "ModelParallelStrategy()": ("_device_mesh", "_forward_redirection", "_save_distributed_checkpoint"),
    },
)
DEEPSPEED = _Names(
    "lightning",
    {
        "DeepSpeedStrategy": (
            "_init_deepspeed_distributed",
            "_initialize_deepspeed_inference",
            "_initialize_deepspeed_train",
            "_load_config",
            "_setup_model_and_optimizer",
        ),
        "DeepSpeedStrategy()": ("_config_initialized", "_forward_redirection"),
        "FitLoop": ("_should_accumulate",),
    },
)
PIPELINE = _Names("lightning", {"EvaluationLoop()": ("_data_source",)})


def trainer_of(module: Any) -> Trainer | None:
    """The Trainer that the module is attached to, if any; ``module`` may be any ``nn.Module``."""
    return getattr(module, "_trainer", None)


def attached_to(module: Any) -> list[Any]:
    """The Trainer and the Fabric that a LightningModule belongs to."""
    return [one for one in (vars(module).get(name) for name in ("_trainer", "_fabric")) if one is not None]


def is_compiled(module: Any) -> bool:
    """Whether Lightning was given ``torch.compile(module)``, which it takes apart again."""
    return vars(module).get("_compiler_ctx") is not None


def load_files_by_device() -> None:
    """Have Lightning load a file to ``"cpu"``, not by a function that says the same.

    torch rebuilds tensors of a subclass, such as the optimizer state of torchao, for a device that has a name only.
    """
    load: Any = __getattr__("TorchCheckpointIO").load_checkpoint
    load.__defaults__ = tuple("cpu" if callable(default) else default for default in load.__defaults__)


def accumulates(trainer: Trainer) -> bool:
    """Whether the batch at hand is not the last one before an optimizer step."""
    return cast("Any", trainer.fit_loop)._should_accumulate()


def step_inputs(trainer: Trainer, batch: Any, batch_idx: int) -> list[Any]:
    """The arguments that ``training_step`` takes for a batch."""
    return list(cast("Any", trainer.fit_loop.epoch_loop)._build_kwargs(OrderedDict(), batch, batch_idx).values())


def draws_batches_itself(trainer: Trainer) -> bool:
    """Whether ``training_step`` takes the data loader's iterator."""
    fetcher_class: Any = __getattr__("DataLoaderIterDataFetcher")
    return isinstance(cast("Any", trainer.fit_loop)._data_fetcher, fetcher_class)


def logged_step(trainer: Trainer) -> int:
    """The step at which Lightning logs the batch at hand."""
    return cast("Any", trainer.fit_loop.epoch_loop)._batches_that_stepped


def last_saved(callback: ModelCheckpoint) -> str:
    """The path of the checkpoint that the callback saved last; empty before the first."""
    return cast("Any", callback)._last_checkpoint_saved


@contextmanager
def checkpoint_connector(trainer: Trainer) -> Generator[Any, None, None]:
    """What restores a run from a checkpoint; afterwards the Trainer's own ``ckpt_path`` is as before."""
    connector: Any = cast("Any", trainer)._checkpoint_connector
    before = connector._ckpt_path
    try:
        yield connector
    finally:
        connector._ckpt_path = before


def keep_sampler(trainer: Trainer) -> None:
    """Have the Trainer leave the user's own sampler in place of a ``DistributedSampler``."""
    cast("Any", trainer)._accelerator_connector.use_distributed_sampler = False


def validates(trainer: Trainer) -> bool:
    """Whether the fit at hand has data to validate on."""
    return cast("Any", trainer.fit_loop.epoch_loop.val_loop)._data_source.is_defined()


def ddp_hooks(strategy: Any) -> tuple[Any, Any]:
    """The communication hook that ``DDPStrategy`` was given, and the wrapper around it; ``None`` for each not given."""
    return getattr(strategy, "_ddp_comm_hook", None), getattr(strategy, "_ddp_comm_wrapper", None)


def layer_sync_of(strategy: Any) -> Any:
    """What ``sync_batchnorm=True``, or a plugin, put there to synchronize layers over ranks; ``None`` where nothing."""
    return getattr(strategy, "given_layer_sync", None) or getattr(strategy, "_layer_sync", None)


def mesh_of(strategy: ModelParallelStrategy) -> Any:
    """The device mesh of the strategy; ``None`` before it has laid one."""
    return cast("Any", strategy)._device_mesh


def set_mesh(module: LightningModule, mesh: Any) -> None:
    """Make ``mesh`` the module's ``device_mesh``."""
    cast("Any", module)._device_mesh = mesh


def called_by_grad_norm() -> bool:
    """Whether the function that asks was called by Lightning's ``grad_norm``."""
    frame: Any = inspect.currentframe()
    for _ in range(6):  # the mode that asks, and what torch has in between
        if frame is None or frame.f_globals.get("__name__", "").endswith("pytorch.utilities.grads"):
            break
        frame = frame.f_back
    else:
        return False
    return frame is not None
