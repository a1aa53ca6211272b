"""What the strategies share: the plan they run, checkpoints that every other one reads, and what none can run."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_mp.checkpoints import folders
from lightning_mp.checkpoints.formats import (
    CheckpointFormatError,
    Kind,
    by_parameter,
    is_remote_path,
    kind_of,
    plain_names,
    without_file_protocol,
)
from lightning_mp.checkpoints.full import read_full
from lightning_mp.checkpoints.lazy import LazyStates, LazyWeights
from lightning_mp.compat.lightning import (
    LightningModule,
    ParallelStrategy,
    Precision,
    Strategy,
    TorchCheckpointIO,
    TorchSyncBatchNorm,
    TrainerFn,
    WeightAveraging,
    callbacks,
    give_new_trainer,
    precision_word,
    rank_zero_info,
    trainer_of,
)
from lightning_mp.compat.torch import LAST_RATES
from lightning_mp.errors import Faults, PlanError
from lightning_mp.fsdp2.units import share_buffers
from lightning_mp.modules.patterns import plain_name
from lightning_mp.modules.remote import is_remote
from lightning_mp.numerics.dtypes import TORCH_DTYPES
from lightning_mp.plan.plan import MixedPrecisionPlan
from lightning_mp.record import file_format

_Base = ParallelStrategy if TYPE_CHECKING else object
_HOST_PLUGIN: Any = Strategy.precision_plugin
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def plan_of(strategy: Strategy) -> MixedPrecisionPlan:
    """The plan that the strategy carries out; a PlanError where the Trainer has another plugin, or none."""
    plugin = strategy.precision_plugin
    if isinstance(plugin, MixedPrecisionPlan):
        return plugin
    raise PlanError.of(
        f"{type(strategy).__name__} with {_written(plugin)}",
        "write Trainer(precision=..., strategy=...), or Trainer(plugins=[MixedPrecisionPlan(...)], strategy=...)",
        "strategy",
    )


class PlanStrategy(_Base):
    """Runs the plan it was made for, the one that the Trainer has, or the one that ``precision=`` names.

    Anything else is refused where it is given. One of ``make_strategy`` serves many Trainers: each but the first gets
    another like it.
    """

    #: the name and the plan that ``make_strategy`` was given
    made_as: str = ""
    made_for: MixedPrecisionPlan | None = None
    #: the name under which ``register_plan`` keeps that plan
    plan_name: str | None = None
    #: whether every rank writes files of its own, instead of one by the CheckpointIO
    saves_folders = False
    #: the format that the host strategy reads itself, if any
    own_format: Kind | None = "file"
    #: makes another one like it, for each Trainer that is given this one but the first
    made_again: Callable[[], Strategy] | None = None
    #: the folder of the host's own format that a checkpoint was read from last; ``None`` for any other checkpoint
    _folder: str | None = None
    _in_use = False

    def _read_accelerator(self) -> Any:
        # The first that a Trainer reads of a strategy object. What an earlier one has set would contradict its own
        # accelerator=, plugins= and devices=.
        if self.made_again is not None and give_new_trainer(None):
            if self._in_use:
                fresh: Any = self.made_again()
                give_new_trainer(fresh)
                return vars(fresh)["_accelerator"]
            self._in_use = True
        return vars(self).get("_accelerator")

    _accelerator: Any = property(_read_accelerator, lambda self, value: vars(self).update(_accelerator=value))

    #: what ``sync_batchnorm=True`` means is left to the plan: Lightning would replace batch norms, pinned ones too. It
    #: is shown no more than the layer synchronization of a user's own class
    given_layer_sync: Any = None

    def _shown_layer_sync(self) -> Any:
        return None if type(self.given_layer_sync) is TorchSyncBatchNorm else self.given_layer_sync

    _layer_sync: Any = property(_shown_layer_sync, lambda self, value: setattr(self, "given_layer_sync", value))

    @property
    def _user_module(self) -> LightningModule:
        assert self.lightning_module is not None, "outside of a run"
        return self.lightning_module

    @property
    def _engine(self) -> Any:
        """What carries the plan out in the run at hand."""
        return plan_of(self).engine

    def take_plan(self, plugin: Precision | None) -> None:
        # Not before: a Trainer refuses plugins= beside a strategy that has its own, be it the same.
        _HOST_PLUGIN.fset(self, self._plan_beside(plugin))
        if plugin is not None:
            plan_of(self)

    if not TYPE_CHECKING:
        #: the plan of the run; what Lightning chose where there is none yet
        precision_plugin = property(_HOST_PLUGIN.fget, take_plan)

    def _plan_beside(self, plugin: Precision | None) -> Precision | None:
        plan = self.made_for
        if plugin is None or (plan is not None and plan.same_as(plugin)):
            return plugin
        word = precision_word(plugin)
        if plan is None and word is not None:
            plan = MixedPrecisionPlan(word)
            note = "; fp16 on a CPU too" if plan.precision.startswith("16") else ""
            rank_zero_info(f"{type(self).__name__} has no plan: it runs precision={word!r} as {plan!r}{note}")
        elif plan is None:
            return plugin
        elif word is not None and self.plan_name is not None and word != "32-true":
            rank_zero_info(f"precision={word!r} is not used: the plan {self.plan_name!r} is the run's, {plan!r}")
        elif word != "32-true":  # which a Trainer also has where nothing is given
            theirs = repr(plugin) if isinstance(plugin, MixedPrecisionPlan) else _written(plugin)
            raise PlanError.of(
                f"{theirs} in a Trainer whose strategy was made for {plan!r}",
                "remove plugins= or precision= from the Trainer, or make the strategy for the plan that is to run",
                "Trainer",
            )
        return plan

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save as the host does, with the dtypes that parameters and buffers are stored in."""
        checkpoint[file_format.NOTES] = file_format.stamped(
            {
                "dtypes": self.stored_dtypes(),
                "strategy": type(self).__name__,
                "world_size": self.world_size,
            }
        )
        path = str(without_file_protocol(self.broadcast(filepath)))
        if self.saves_folders:
            self._save_folder(checkpoint, path, storage_options)
        elif not (is_remote_path(path) or self._users_io):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        elif self.is_global_zero:  # Lightning's strategies of shards would take the path for that of a local file
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def _save_folder(self, checkpoint: dict[str, Any], path: str, storage_options: Any) -> None:
        first_of_node = self.local_rank == 0
        if first_of_node:
            folders.begin(path)
        self.barrier()
        super().save_checkpoint(checkpoint, folders.unfinished(path), storage_options=storage_options)
        self.barrier()  # the Trainer has one afterwards
        if first_of_node:
            folders.finish(path)

    def share_buffers(self) -> None:
        """Broadcast rank 0's saved buffers, as under DDP: the model is evaluated with what is saved."""
        share_buffers(self._user_module, self.root_device)

    def stored_dtypes(self) -> dict[str, str]:
        """The short dtype name of every floating parameter and buffer."""
        named = (*self._user_module.named_parameters(), *self._user_module.named_buffers())
        return {plain_name(name): _NAMES[tensor.dtype] for name, tensor in named if tensor.dtype in _NAMES}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the checkpoint as Lightning's single file has it. Every rank calls it.

        Nothing is loaded yet: Lightning first hands the checkpoint to ``on_load_checkpoint``, which may change it, and
        then calls :meth:`load_model_state_dict` and, in a fit, :meth:`load_optimizer_state_dict`.

        Raises:
            CheckpointFormatError: there is no checkpoint, or it cannot be read.
        """
        path = str(without_file_protocol(self.broadcast(checkpoint_path)))
        if self.local_rank == 0:
            folders.recover(path)
        self.barrier()
        self._folder = None
        if self._format(path) != "file":
            with self._optimizers_while_fitting():
                if self.reads(path):
                    self._folder = path
                    return self.open_folder(path, weights_only)
            checkpoint = read_full(path, weights_only=weights_only)
        else:
            # torch rebuilds tensors of a subclass (torchao's optimizer state) for a device that has a name only
            device = {} if self._users_io else {"map_location": "cpu"}
            checkpoint = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only, **cast("Any", device))
            if self.own_format == "file":
                return checkpoint
            checkpoint["state_dict"] = plain_names(checkpoint["state_dict"])
        if left_out := checkpoint.pop("optimizer_left_out", None):
            rank_zero_info(f"{left_out} The learning rate is the scheduler's.")
        return checkpoint

    def open_folder(self, path: str, weights_only: bool | None) -> dict[str, Any]:
        """Return the checkpoint in a folder of the host's own format; weights and states of optimizers are lazy."""
        raise NotImplementedError

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True: Lightning hands the optimizer states over after the hooks of callbacks, as under DDP."""
        return True

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights that hooks left in the checkpoint; from the folder, if they touched none."""
        weights = checkpoint["state_dict"]
        with self._optimizers_while_fitting():
            if isinstance(weights, LazyWeights) and not weights.touched:
                self.load_folder_weights(weights, strict=strict)
            else:
                self.load_whole_weights(dict(weights) if isinstance(weights, LazyWeights) else weights, strict=strict)

    def load_folder_weights(self, weights: LazyWeights, *, strict: bool) -> None:
        """Load this rank's part of the weights in a folder of the host's own format."""
        raise NotImplementedError

    def load_whole_weights(self, weights: Mapping[str, Any], *, strict: bool) -> None:
        """Load whole weights, of which every rank has all."""
        self._user_module.load_state_dict(weights, strict=strict)

    @contextmanager
    def _optimizers_while_fitting(self) -> Generator[None, None, None]:
        """Weights alone are loaded to evaluate: the optimizers that are left from a fit may be another module's."""
        trainer, kept = trainer_of(self.lightning_module), self.optimizers
        if trainer is not None and trainer.state.fn != TrainerFn.FITTING:
            self.optimizers = []
        try:
            yield
        finally:
            self.optimizers = kept

    @property
    def _users_io(self) -> bool:
        return type(self.checkpoint_io) is not TorchCheckpointIO

    def _format(self, path: Any) -> Kind:
        """What lies at ``path``; a "file" is what the CheckpointIO reads, a user's plugin whatever it wrote."""
        try:
            return kind_of(path)
        except CheckpointFormatError:
            if self._users_io:
                return "file"
            raise

    def reads(self, path: Any) -> bool:
        """Whether the host strategy can be left to read what lies at ``path``."""
        return self._format(path) == self.own_format

    def load_sharded_weights(self, weights: Mapping[str, Any], *, strict: bool) -> None:
        """Load what this rank holds of whole weights.

        Raises:
            RuntimeError: ``strict``, and a name is in one of the checkpoint and the module alone.
        """
        module = self._user_module
        state = module.state_dict()
        own_names = {plain_name(name): name for name in state}
        here = {plain: state[name] for plain, name in own_names.items()}
        gone = {name for name, parameter in module.named_parameters(remove_duplicate=False) if is_remote(parameter)}
        if gone and strict and (different := here.keys() ^ weights.keys()):
            names = ", ".join(sorted(different))
            raise RuntimeError(f"only one of the checkpoint and {type(module).__name__} has {names}")
        shards = {
            own_names.get(name, name): sharded_like(here.get(name), value)
            for name, value in weights.items()
            if name not in gone
        }
        module.load_state_dict(shards, strict=strict and not gone)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer states that hooks left in the checkpoint; from the folder, if they touched none.

        Without any state the learning rates are those of the schedulers.
        """
        states = checkpoint["optimizer_states"]
        if isinstance(states, LazyStates) and not states.touched:
            self.load_folder_states(states)
        elif states:
            self.load_whole_states(list(states))
        else:
            set_learning_rates(self.optimizers, checkpoint)

    def load_folder_states(self, states: LazyStates) -> None:
        """Load this rank's part of the optimizer states in a folder of the host's own format."""
        raise NotImplementedError

    def load_whole_states(self, states: list[Any]) -> None:
        """Load optimizer states for whole parameters, one an optimizer."""
        super().load_optimizer_state_dict({"optimizer_states": states})

    def load_sharded_states(self, states: list[Any]) -> None:
        """Load what this rank holds of optimizer states for whole parameters.

        Lightning's own way takes the numbers in an optimizer's state for positions in the *model*, which they are not
        where an optimizer has several groups or leaves parameters out.
        """
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(by_parameter(state, optimizer, _held))


def sharded_like(target: Any, full: Any) -> Any:
    """``full``, sharded as ``target`` is if that is a DTensor of its shape."""
    if not isinstance(target, DTensor) or not isinstance(full, Tensor) or full.shape != target.shape:
        return full
    return distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)


def _held(parameter: Tensor | None, values: Mapping[str, Any]) -> dict[str, Any] | None:
    if parameter is not None and is_remote(parameter):
        return None
    return {key: sharded_like(parameter, value) for key, value in values.items()}


def set_learning_rates(optimizers: Any, checkpoint: Mapping[str, Any]) -> None:
    """Give each optimizer's groups the learning rates of the checkpoint's schedulers."""
    for optimizer, state in zip(optimizers, checkpoint.get("lr_schedulers") or (), strict=False):
        for group, rate in zip(optimizer.param_groups, state.get(LAST_RATES) or (), strict=False):
            group["lr"] = rate if not isinstance(group["lr"], torch.Tensor) else group["lr"].fill_(rate)


def _written(plugin: Precision) -> str:
    return f"{type(plugin).__name__}({plugin.precision!r})"


# ------------------------------------------------------------------ what cannot work on weights that are not whole

_AVERAGES: tuple[Any, ...] = (WeightAveraging, callbacks.StochasticWeightAveraging)
# the learning-rate finder waits for ever where it restores what it saved
_NEED_ALL: tuple[Any, ...] = (*_AVERAGES, callbacks.ModelPruning, callbacks.LearningRateFinder)
# BaseFinetuning finds what an optimizer has by comparing numbers
_UNFIT: dict[str, tuple[Any, ...]] = {
    "sharded weights": _NEED_ALL,
    "pipeline stages": (*_NEED_ALL, callbacks.BaseFinetuning),
    "FSDP1's flat parameters": (*_AVERAGES, callbacks.ModelPruning, callbacks.BaseFinetuning),
    "ZeRO, whose weights and schedule are DeepSpeed's": _NEED_ALL,
}


def refuse_callbacks(module: Any, why: str, faults: Faults) -> None:
    """Note each callback of a fit that cannot work where weights are held as ``why``, a key of the table, says."""
    trainer: Any = trainer_of(module)
    for callback in trainer.callbacks if trainer and trainer.state.fn == TrainerFn.FITTING else ():
        if isinstance(callback, _UNFIT[why]):
            name = type(callback).__name__
            faults.add(f"{name} with {why}", fix=f"remove {name}, or use strategy='mp_ddp'")


def refuse_gradients(module: nn.Module, faults: Faults, ignored: Iterable[Any] = ()) -> None:
    """Add a fault for each weight whose gradients cannot be summed into shards; ``ignored`` ones are not sharded."""
    left_out = set(map(id, ignored))
    for name, parameter in module.named_parameters():
        if parameter.is_complex() and id(parameter) not in left_out:
            faults.add(
                f"{name!r}, a complex parameter, with sharded weights, which are gathered and summed as real numbers",
                fix="keep torch.view_as_real(value) as the parameter, call torch.view_as_complex(weight) in forward, "
                "or use strategy='mp_ddp'",
            )
    for name, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse and id(part.weight) not in left_out:
            faults.add(
                f"{name!r} with sparse=True, with sharded weights, whose gradients are summed as dense tensors",
                fix="leave sparse=True out, or use strategy='mp_ddp'",
            )


def refuse_weights(
    module: nn.Module,
    faults: Faults,
    ignored: Iterable[Any] = (),
    *,
    why: str = "sharded weights",
    whole: bool = False,
) -> None:
    """Note weights of which ranks cannot hold shards, and embeddings whose forward writes to weights not ``whole``.

    The ``ignored`` ones are not sharded.
    """
    left_out = set(map(id, ignored))
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0 and id(parameter) not in left_out:
            faults.add(
                f"{name!r}, a parameter without a dimension, with {why}",
                fix="make it nn.Parameter(value.view(1)), which computes the same, or use strategy='mp_ddp'",
            )
    for name, part in () if whole else module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            faults.add(
                f"{name!r} with max_norm={part.max_norm:g}, with sharded weights: its forward scales rows of the "
                "gathered copy, which the shards never see",
                fix="leave max_norm out and limit the rows after each step, or use strategy='mp_ddp'",
            )
