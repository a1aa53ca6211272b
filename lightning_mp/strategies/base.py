"""What the strategies share: the plan they need, who synchronizes batch norms, and what none can run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from lightning_mp.compat.lightning import (
    LightningModule,
    Precision,
    Strategy,
    TorchSyncBatchNorm,
    TrainerFn,
    WeightAveraging,
    callbacks,
    check_copy,
    give_new_trainer,
    precision_word,
    rank_zero_info,
    trainer_of,
)
from lightning_mp.errors import Faults, PlanError
from lightning_mp.plan.plan import MixedPrecisionPlan

_Base = Strategy if TYPE_CHECKING else object
_HOST_PLUGIN: Any = Strategy.precision_plugin


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


class RunsPlan(_Base):
    """Runs the plan it was made for, the one that the Trainer has, or the one that ``precision=`` names.

    Anything else is refused where it is given. One object serves many Trainers: each but the first gets a copy, as it
    was made.
    """

    #: the plan that ``make_strategy`` was given
    made_for: MixedPrecisionPlan | None = None
    #: the name under which ``register_plan`` keeps that plan
    plan_name: str | None = None
    #: the attributes before the first Trainer set its own
    _as_made: dict[str, Any] | None = None

    def _read_accelerator(self) -> Any:
        # The first that a Trainer reads of a strategy object. What an earlier one has set would contradict its own
        # accelerator=, plugins= and devices=.
        if give_new_trainer(None):
            if self._as_made is None:
                self._as_made = _copied(self.__dict__)
            else:
                fresh: Any = object.__new__(type(self))
                vars(fresh).update(_copied(self._as_made), _as_made=self._as_made)
                give_new_trainer(fresh)
                return vars(fresh)["_accelerator"]
        return vars(self).get("_accelerator")

    def _set_accelerator(self, value: Any) -> None:
        vars(self)["_accelerator"] = value

    _accelerator: Any = cast("Any", property(_read_accelerator, _set_accelerator))

    #: what ``sync_batchnorm=True`` means is left to the plan: Lightning would replace batch norms, pinned ones too. It
    #: is shown no more than the layer synchronization of a user's own class
    given_layer_sync: Any = None

    def _shown_layer_sync(self) -> Any:
        return None if type(self.given_layer_sync) is TorchSyncBatchNorm else self.given_layer_sync

    def _take_layer_sync(self, value: Any) -> None:
        self.given_layer_sync = value

    _layer_sync: Any = cast("Any", property(_shown_layer_sync, _take_layer_sync))

    @property
    def _user_module(self) -> LightningModule:
        assert self.lightning_module is not None, "outside of a run"
        return self.lightning_module

    def take_plan(self, plugin: Precision | None) -> None:
        # Not before: a Trainer refuses plugins= beside a strategy that has its own, be it the same.
        _HOST_PLUGIN.fset(self, self._plan_beside(plugin))
        if plugin is not None:
            plan_of(self)

    if not TYPE_CHECKING:
        #: the plan of the run; what Lightning chose where there is none yet
        precision_plugin = property(_HOST_PLUGIN.fget, take_plan)

    def _plan_beside(self, plugin: Precision | None) -> Precision | None:
        if not isinstance(plugin, MixedPrecisionPlan):
            check_copy(plugin, type(self).__name__)
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


def _copied(value: Any) -> Any:
    """Containers anew, what is in them as it is: keywords may hold a user's modules."""
    if type(value) is dict:
        return {key: _copied(item) for key, item in cast("dict[Any, Any]", value).items()}
    return [_copied(item) for item in cast("list[Any]", value)] if type(value) is list else value


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
    trainer = trainer_of(module)
    fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
    for callback in cast("Any", trainer).callbacks if fitting else ():
        if isinstance(callback, _UNFIT[why]):
            name = type(callback).__name__
            faults.add(f"{name} with {why}", fix=f"remove {name}, or use strategy='mp_ddp'")


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
