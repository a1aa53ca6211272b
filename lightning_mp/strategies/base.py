"""The base of all strategies: the Trainer's plan, checkpoints, and checks of a module."""

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
    """Return the plan that the strategy runs.

    Raises:
        PlanError: the Trainer has another precision plugin.
    """
    plugin = strategy.precision_plugin
    if isinstance(plugin, MixedPrecisionPlan):
        return plugin
    raise PlanError.of(
        f"{type(strategy).__name__} with {_written(plugin)}",
        "write Trainer(precision=..., strategy=...), or Trainer(plugins=[MixedPrecisionPlan(...)], strategy=...)",
        "strategy",
    )


class PlanStrategy(_Base):
    """The base of strategies that run a plan.

    The plan is the one that ``make_strategy`` was given, the Trainer's plugin, or the plan that
    ``precision=`` names. A strategy of ``make_strategy`` serves many Trainers: each Trainer after
    the first gets a new equal strategy.

    Raises:
        PlanError: when a Trainer sets ``precision_plugin``, if it contradicts the plan or is no
            plan.
    """

    #: the name and the plan that ``make_strategy`` was given
    made_as: str = ""
    made_for: MixedPrecisionPlan | None = None
    #: the name under which ``register_plan`` keeps that plan
    plan_name: str | None = None
    #: True if a checkpoint is a folder with files of all ranks, instead of one file of the
    #: CheckpointIO
    saves_folders = False
    #: the checkpoint format that the host strategy reads by itself, ``None`` if it reads none
    own_format: Kind | None = "file"
    #: makes an equal strategy, for each Trainer after the first that is given this one
    made_again: Callable[[], Strategy] | None = None
    #: the folder that the last checkpoint was read from if it has the host's own format, else
    #: ``None``
    _folder: str | None = None
    _in_use = False

    def _read_accelerator(self) -> Any:
        # A Trainer reads this first of a strategy object. Values that an earlier Trainer has set
        # would contradict its own accelerator=, plugins= and devices=.
        if self.made_again is not None and give_new_trainer(None):
            if self._in_use:
                fresh: Any = self.made_again()
                give_new_trainer(fresh)
                return vars(fresh)["_accelerator"]
            self._in_use = True
        return vars(self).get("_accelerator")

    _accelerator: Any = property(_read_accelerator, lambda self, value: vars(self).update(_accelerator=value))

    #: the layer synchronization that the Trainer was given. The plan synchronizes for
    #: ``sync_batchnorm=True``, because Lightning would replace batch norms, pinned ones too. So
    #: Lightning sees only a user's own class here.
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
        """Return the plan's step engine of the present run."""
        return plan_of(self).engine

    def take_plan(self, plugin: Precision | None) -> None:
        """Set the plan of the run beside the Trainer's ``plugin``. It sets ``precision_plugin``.

        Raises:
            PlanError: the plugin contradicts the plan that the strategy was made for, or it is no
                plan and names no precision of Lightning's.
        """
        # Set here and not earlier: a Trainer refuses plugins= if the strategy has a plugin, even
        # the same one.
        _HOST_PLUGIN.fset(self, self._plan_beside(plugin))
        if plugin is not None:
            plan_of(self)

    if not TYPE_CHECKING:
        #: the plan of the run, or Lightning's choice before there is a plan
        precision_plugin = property(_HOST_PLUGIN.fget, take_plan)

    def _plan_beside(self, plugin: Precision | None) -> Precision | None:
        """Return the plan to run if the Trainer has ``plugin``.

        It is the strategy's own plan, or else the plugin. If the plugin is Lightning's for a
        ``precision=``, it is a new plan for that precision. ``None`` returns ``None``.

        Raises:
            PlanError: the plugin contradicts the strategy's own plan.
        """
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
        elif word != "32-true":  # a Trainer has 32-true also if nothing is given
            theirs = repr(plugin) if isinstance(plugin, MixedPrecisionPlan) else _written(plugin)
            raise PlanError.of(
                f"{theirs} in a Trainer whose strategy was made for {plan!r}",
                "remove plugins= or precision= from the Trainer, or make the strategy for the plan that is to run",
                "Trainer",
            )
        return plan

    def on_exception(self, exception: BaseException) -> None:
        """As the host does; first add to torch's error what the engine knows of its cause."""
        engine = None if self.lightning_module is None else plan_of(self).engine
        if engine is not None:
            engine.explain(exception)
        super().on_exception(exception)

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save ``checkpoint`` as the host strategy does. Every rank calls it.

        An entry is added to ``checkpoint``, with the dtypes of parameters and buffers, the strategy
        and the world size.
        """
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
        elif self.is_global_zero:  # Lightning's sharded strategies would take it for a local path
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def _save_folder(self, checkpoint: dict[str, Any], path: str, storage_options: Any) -> None:
        """Save a folder next to ``path``, then rename it to ``path``. A collective."""
        first_of_node = self.local_rank == 0
        if first_of_node:
            folders.begin(path)
        self.barrier()
        super().save_checkpoint(checkpoint, folders.unfinished(path), storage_options=storage_options)
        self.barrier()  # the Trainer has another barrier after finish()
        if first_of_node:
            folders.finish(path)

    def share_buffers(self) -> None:
        """Broadcast rank 0's saved buffers, as DDP does. A collective.

        The model is then evaluated with the buffers that are saved.
        """
        share_buffers(self._user_module, self.root_device)

    def stored_dtypes(self) -> dict[str, str]:
        """Return the short dtype names of parameters and buffers in fp32, bf16 or fp16, by name."""
        named = (*self._user_module.named_parameters(), *self._user_module.named_buffers())
        return {plain_name(name): _NAMES[tensor.dtype] for name, tensor in named if tensor.dtype in _NAMES}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the checkpoint as Lightning's single file has it. Every rank calls it.

        Nothing is loaded yet. Lightning first passes the checkpoint to ``on_load_checkpoint``,
        which may change it. Then it calls :meth:`load_model_state_dict` and, in a fit,
        :meth:`load_optimizer_state_dict`. From a folder of the host's own format, weights and
        optimizer states are lazy.

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
            # torch rebuilds tensors of a subclass (torchao's optimizer state) only for a device
            # given by name
            device = {} if self._users_io else {"map_location": "cpu"}
            checkpoint = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only, **cast("Any", device))
            if self.own_format == "file":
                return checkpoint
            checkpoint["state_dict"] = plain_names(checkpoint["state_dict"])
        if left_out := checkpoint.pop("optimizer_left_out", None):
            rank_zero_info(f"{left_out} The learning rate is the scheduler's.")
        return checkpoint

    def open_folder(self, path: str, weights_only: bool | None) -> dict[str, Any]:
        """Return the checkpoint in a folder of the host's own format.

        Weights and optimizer states are lazy.
        """
        raise NotImplementedError

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True: Lightning loads the optimizer states after the hooks of callbacks, as under DDP."""
        return True

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of the checkpoint, after hooks changed it. Every rank calls it.

        If no hook touched the weights of a folder, each rank reads only its part.
        """
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
        """Load whole weights. Every rank has all of them."""
        self._user_module.load_state_dict(weights, strict=strict)

    @contextmanager
    def _optimizers_while_fitting(self) -> Generator[None, None, None]:
        """Outside of a fit, take ``self.optimizers`` away within the context.

        Only weights are loaded for evaluation, and optimizers left from a fit may belong to another
        module.
        """
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
        """Return the format of the checkpoint at ``path``.

        ``"file"`` means that the CheckpointIO reads it. A path that is no known format is
        ``"file"`` under a user's own CheckpointIO.

        Raises:
            CheckpointFormatError: there is no complete checkpoint, under Lightning's own
                CheckpointIO.
        """
        try:
            return kind_of(path)
        except CheckpointFormatError:
            if self._users_io:
                return "file"
            raise

    def reads(self, path: Any) -> bool:
        """True if the host strategy can read the checkpoint at ``path`` by itself."""
        return self._format(path) == self.own_format

    def load_sharded_weights(self, weights: Mapping[str, Any], *, strict: bool) -> None:
        """Load this rank's shards of whole weights.

        Raises:
            RuntimeError: a shape differs; or ``strict``, and a name is missing in the checkpoint or
                in the module.
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
        """Load the optimizer states of the checkpoint, after hooks changed it. Every rank calls it.

        If no hook touched the states of a folder, each rank reads only its part. If there are no
        states, the optimizers' learning rates are set to the schedulers'.
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
        """Load optimizer states of whole parameters, one state for each optimizer."""
        super().load_optimizer_state_dict({"optimizer_states": states})

    def load_sharded_states(self, states: list[Any]) -> None:
        """Load this rank's shards of optimizer states of whole parameters.

        Lightning's own way reads the numbers in an optimizer's state as positions in the *model*.
        They differ if an optimizer has several groups, or leaves parameters out.
        """
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(by_parameter(state, optimizer, _held))


def sharded_like(target: Any, full: Any) -> Any:
    """Return ``full`` sharded like ``target`` if ``target`` is a DTensor of its shape.

    Otherwise return ``full``. Every rank has the whole tensor, so nothing is sent.
    """
    if not isinstance(target, DTensor) or not isinstance(full, Tensor) or full.shape != target.shape:
        return full
    return distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)


def _held(parameter: Tensor | None, values: Mapping[str, Any]) -> dict[str, Any] | None:
    if parameter is not None and is_remote(parameter):
        return None
    return {key: sharded_like(parameter, value) for key, value in values.items()}


def set_learning_rates(optimizers: Any, checkpoint: Mapping[str, Any]) -> None:
    """Set learning rates to the last rates of the checkpoint's schedulers.

    The first optimizer takes the rates of the first scheduler, and so on. Optimizers without a
    scheduler keep their rates.
    """
    for optimizer, state in zip(optimizers, checkpoint.get("lr_schedulers") or (), strict=False):
        for group, rate in zip(optimizer.param_groups, state.get(LAST_RATES) or (), strict=False):
            group["lr"] = rate if not isinstance(group["lr"], torch.Tensor) else group["lr"].fill_(rate)


def _written(plugin: Precision) -> str:
    return f"{type(plugin).__name__}({plugin.precision!r})"


# ------------------------------------------------------------------ checks of split weights

_AVERAGES: tuple[Any, ...] = (WeightAveraging, callbacks.StochasticWeightAveraging)
# the learning-rate finder deadlocks when it restores its checkpoint
_NEED_ALL: tuple[Any, ...] = (*_AVERAGES, callbacks.ModelPruning, callbacks.LearningRateFinder)
# BaseFinetuning finds an optimizer's parameters by comparing values
_UNFIT: dict[str, tuple[Any, ...]] = {
    "sharded weights": _NEED_ALL,
    "pipeline stages": (*_NEED_ALL, callbacks.BaseFinetuning),
    "FSDP1's flat parameters": (*_AVERAGES, callbacks.ModelPruning, callbacks.BaseFinetuning),
    "ZeRO, whose weights and schedule are DeepSpeed's": _NEED_ALL,
}


def refuse_callbacks(module: Any, why: str, faults: Faults) -> None:
    """Add a fault for each callback of a fit that cannot work. ``why`` is a key of ``_UNFIT``."""
    trainer: Any = trainer_of(module)
    for callback in trainer.callbacks if trainer and trainer.state.fn == TrainerFn.FITTING else ():
        if isinstance(callback, _UNFIT[why]):
            name = type(callback).__name__
            faults.add(f"{name} with {why}", fix=f"remove {name}, or use strategy='mp_ddp'")


def refuse_gradients(module: nn.Module, faults: Faults, ignored: Iterable[Any] = ()) -> None:
    """Add a fault for each weight whose gradients cannot be reduced into shards: complex or sparse.

    Weights in ``ignored`` are not sharded, and pass.
    """
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
    """Add a fault for each weight that cannot be sharded.

    They are parameters without a dimension, and embeddings with ``max_norm``, whose forward writes
    to the weight.

    Args:
        module: the module to check.
        faults: the list of faults.
        ignored: parameters that are not sharded. A parameter without a dimension then passes.
        why: the words of the message for the strategy.
        whole: True if each rank has whole weights. Embeddings with ``max_norm`` then pass.
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
