"""What the strategies share: the plan they need, who synchronizes batch norms, and how they end."""

from __future__ import annotations

import atexit
import subprocess
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from lightning_mp.compat.lightning import (
    Precision,
    Strategy,
    SubprocessScriptLauncher,
    TorchSyncBatchNorm,
    check_copy,
    give_new_trainer,
    precision_word,
    rank_zero_info,
)
from lightning_mp.errors import Fault, PlanError
from lightning_mp.precision import MixedPrecisionPlan

_Base = Strategy if TYPE_CHECKING else object

#: seconds that ranks have to end by themselves, and to say why, once the one that started them has failed
PATIENCE = 10.0


def plan_of(strategy: Strategy) -> MixedPrecisionPlan:
    """The plan that the strategy carries out.

    Raises:
        PlanError: the Trainer has another precision plugin, or none.
    """
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

    def on_exception(self, exception: BaseException) -> None:
        """As the host does; the children are waited for at exit, when this rank's own message has been printed.

        Lightning watches in one direction only: rank 0 is ended when one of its children fails. The other way round
        they would stay: on NCCL in a collective, until its timeout of half an hour.
        """
        launcher: Any = cast("Any", self).launcher
        if isinstance(launcher, SubprocessScriptLauncher) and launcher.procs:
            atexit.register(_end, launcher.procs)
        super().on_exception(exception)

    @property
    def precision_plugin(self) -> Any:
        """The plan of the run; what Lightning chose where there is none yet."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # Not before: a Trainer refuses plugins= beside a strategy that has its own, be it the same.
        host: Any = super(RunsPlan, type(self)).precision_plugin
        host.fset(self, self._plan_beside(precision_plugin))
        if precision_plugin is not None:
            plan_of(self)

    def _plan_beside(self, plugin: Precision | None) -> Precision | None:
        if not isinstance(plugin, MixedPrecisionPlan):
            check_copy(plugin, type(self).__name__)
        plan = self.made_for
        if plugin is None or (plan is not None and plan.same_as(plugin)):
            return plugin
        word = precision_word(plugin)
        if plan is None:
            return plugin if word is None else self._plan_of(word)
        if word == "32-true":
            return plan  # also what a Trainer has where nothing is given
        if word is not None and self.plan_name is not None:
            rank_zero_info(f"precision={word!r} is not used: the plan {self.plan_name!r} is the run's, {plan!r}")
            return plan
        raise PlanError([_another(plan, plugin)], "Trainer")

    def _plan_of(self, word: Any) -> MixedPrecisionPlan:
        plan = MixedPrecisionPlan(word)
        note = "; fp16 on a CPU too" if plan.precision.startswith("16") else ""
        rank_zero_info(f"{type(self).__name__} has no plan: it runs the Trainer's precision={word!r} as {plan!r}{note}")
        return plan


def _copied(value: Any) -> Any:
    """Containers anew, what is in them as it is: keywords may hold a user's modules."""
    if type(value) is dict:
        return {key: _copied(item) for key, item in cast("dict[Any, Any]", value).items()}
    return [_copied(item) for item in cast("list[Any]", value)] if type(value) is list else value


def _another(plan: MixedPrecisionPlan, plugin: Precision) -> Fault:
    """What to say of a ``plugin``, given in ``plugins=`` or by ``precision=``, beside the strategy's ``plan``."""
    theirs = repr(plugin) if isinstance(plugin, MixedPrecisionPlan) else _written(plugin)
    return Fault(
        f"{theirs} in a Trainer whose strategy was made for {plan!r}",
        "",
        "remove plugins= or precision= from the Trainer, or make the strategy for the plan that is to run",
    )


def _written(plugin: Precision) -> str:
    return f"{type(plugin).__name__}({plugin.precision!r})"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in processes:
        process.kill()  # SIGTERM does not reach a process inside a collective; nothing happens to one that ended
        process.wait()
