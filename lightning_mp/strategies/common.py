"""What the strategies share: the plan they need, and steps that run as the sharded module's forward."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lightning_mp.compat.lightning import Strategy
from lightning_mp.errors import Fault, PlanError
from lightning_mp.precision import MixedPrecisionPlan

_Base = Strategy if TYPE_CHECKING else object


def plan_of(strategy: Strategy) -> MixedPrecisionPlan:
    """The plan that the strategy carries out.

    Raises:
        PlanError: the Trainer has another precision plugin, or none.
    """
    plugin = strategy.precision_plugin
    if isinstance(plugin, MixedPrecisionPlan):
        return plugin
    fault = Fault(
        f"{type(strategy).__name__} with {type(plugin).__name__}",
        "a MixedPrecisionPlan, which says what to run",
        "write Trainer(plugins=[MixedPrecisionPlan(...)], strategy=...), or use trainer_kwargs(plan, strategy=...)",
    )
    raise PlanError([fault], "strategy")


class StepAsForward(_Base):
    """Runs ``training_step`` and its kind as the forward of the root unit, which is gathered meanwhile.

    A parameter that belongs to no inner unit can then be used anywhere in the step, as under DDP.
    """

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._as_forward("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._as_forward("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._as_forward("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._as_forward("predict_step", args, kwargs)

    def _as_forward(self, method: str, args: Any, kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        patched = "forward" in module.__dict__
        try:
            with _children_called():
                return self._forward_redirection(module, module, method, *args, **kwargs)
        finally:
            if not patched:  # Lightning leaves a bound forward on the instance, which a copy would take along
                module.__dict__.pop("forward", None)


@contextmanager
def _children_called() -> Generator[None, None, None]:
    """Torch's attention layers call their children, whose hooks gather and cast, instead of reading their weights."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
