"""What the strategies share: the plan they need, who synchronizes batch norms, and how they end."""

from __future__ import annotations

import atexit
import subprocess
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from lightning_mp.compat.lightning import (
    DeepSpeedPrecision,
    FSDPPrecision,
    ParallelStrategy,
    Precision,
    Strategy,
    SubprocessScriptLauncher,
    TorchSyncBatchNorm,
    check_copy,
)
from lightning_mp.errors import Fault, PlanError
from lightning_mp.precision import MixedPrecisionPlan

_Base, _ParallelBase = (Strategy, ParallelStrategy) if TYPE_CHECKING else (object, object)

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
    fault = Fault(
        f"{type(strategy).__name__} with {_written(plugin)}",
        "a MixedPrecisionPlan, which says what to run",
        "write Trainer(plugins=[MixedPrecisionPlan(...)], strategy=...), or use make_strategy or trainer_kwargs",
    )
    raise PlanError([fault], "strategy")


class RunsPlan(_Base):
    """Runs the plan it was made for, or the one that the Trainer has; anything else is refused where it is given."""

    #: the plan that ``make_strategy`` was given
    made_for: MixedPrecisionPlan | None = None

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
        if plan is None or plugin is None or plan.same_as(plugin):
            return plugin
        if type(plugin) in (Precision, FSDPPrecision, DeepSpeedPrecision) and plugin.precision == "32-true":
            return plan  # what a Trainer chooses where nothing is given
        raise PlanError([_another(plan, plugin)], "Trainer")


def _another(plan: MixedPrecisionPlan, plugin: Precision) -> Fault:
    """What to say of a ``plugin``, given in ``plugins=`` or by ``precision=``, beside the strategy's ``plan``."""
    ours, theirs = (one.policy.to_dict() if isinstance(one, MixedPrecisionPlan) else {} for one in (plan, plugin))
    apart = [
        f"{key} is {value!r} and {theirs[key]!r}" for key, value in ours.items() if theirs.get(key, value) != value
    ]
    where = f": {'; '.join(apart)}" if apart else ""
    return Fault(
        f"{_written(plugin)} in a Trainer whose strategy was made for {_written(plan)}{where}",
        "the plan that the strategy was made for",
        "remove plugins= or precision= from the Trainer, or make the strategy for the plan that is to run",
    )


def _written(plugin: Precision) -> str:
    return f"{type(plugin).__name__}({plugin.precision!r})"


class PlanSyncsBatchNorm(_ParallelBase):
    """Leaves ``sync_batchnorm=True`` to the plan: Lightning would replace the batch norms, pinned ones too.

    Lightning is shown no more than the layer synchronization of a user's own class; the plan sees all.
    """

    given_layer_sync: Any = None

    def _shown(self) -> Any:
        return None if type(self.given_layer_sync) is TorchSyncBatchNorm else self.given_layer_sync

    def _take(self, value: Any) -> None:
        self.given_layer_sync = value

    _layer_sync: Any = cast("Any", property(_shown, _take))


class FailTogether(_Base):
    """Ends the processes that Lightning's own launcher started when the one that started them fails.

    Lightning watches in one direction only: rank 0 is ended when one of its children fails. The other way round they
    would stay: on NCCL in a collective, until its timeout of half an hour.
    """

    def on_exception(self, exception: BaseException) -> None:
        """As the host does; the children are waited for at exit, when this rank's own message has been printed."""
        launcher: Any = self.launcher
        if isinstance(launcher, SubprocessScriptLauncher) and launcher.procs:
            atexit.register(_end, launcher.procs)
        super().on_exception(exception)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in processes:
        process.kill()  # SIGTERM does not reach a process inside a collective; nothing happens to one that ended
        process.wait()
