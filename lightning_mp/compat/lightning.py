"""The one door to Lightning, which has two names: ``lightning.pytorch`` and ``pytorch_lightning``.

They are two copies of the same classes, and a Trainer of one takes nothing that is made of the other. Everything this
package uses of Lightning is therefore imported from here, from the copy that the program has imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    from lightning.pytorch.cli import LightningArgumentParser as LightningArgumentParser
    from lightning.pytorch.cli import LightningCLI as LightningCLI
    from lightning.pytorch.cli import SaveConfigCallback as SaveConfigCallback
    from lightning.pytorch.core.optimizer import LightningOptimizer as LightningOptimizer
    from lightning.pytorch.loggers.logger import DummyLogger as DummyLogger
    from lightning.pytorch.plugins import Precision as Precision
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
    "LightningArgumentParser": "cli",
    "LightningCLI": "cli",
    "SaveConfigCallback": "cli",
    "LightningOptimizer": "core.optimizer",
    "DummyLogger": "loggers.logger",
    "DataLoaderIterDataFetcher": "loops.fetchers",
    "Precision": "plugins",
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
        "DataLoaderIterDataFetcher",
        "ForwardRedirection",
        "SubprocessScriptLauncher",
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
