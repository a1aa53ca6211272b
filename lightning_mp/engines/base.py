"""What every engine can be asked: the life of one step, in the order of the calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.errors import Faults
from lightning_mp.modules.pins import PinMap
from lightning_mp.policy import PrecisionPolicy

#: runs the last batch forward and backward again, without summing over ranks, to find what broke it; or cannot
Replay = Callable[[], Tensor | None] | None


class StepEngine(Protocol):
    """Carries one policy out on one kind of strategy."""

    policy: PrecisionPolicy
    #: gradients came in since the last step
    pending: bool
    #: the global gradient norm of the last clipping, before it
    last_norm: Tensor | None

    def check(self, module: nn.Module, faults: Faults) -> None:
        """Note what in ``module`` the policy cannot be carried out on; change nothing."""
        ...

    @property
    def pin_map(self) -> PinMap:
        """Which pin covers which module; known after ``check``."""
        ...

    def prepare(self, module: nn.Module) -> None:
        """Change ``module`` in place to what the policy declares; ``check`` came before."""
        ...

    def connect(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers, and the model as the strategy wrapped it."""
        ...

    def before_backward(self, loss: Tensor, *, manual: bool) -> Tensor:
        """The loss to run backward on."""
        ...

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> bool:
        """Run backward where the strategy's own engine has to; whether it did."""
        ...

    def after_backward(self, *, manual: bool) -> None:
        """Bring gradients into the state in which users may look at them."""
        ...

    def steps_with_closure(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer cannot step without evaluating the closure itself (LBFGS)."""
        ...

    def may_call_closure(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer may evaluate a closure of its own accord (SAM and its kind)."""
        ...

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring gradients into true units and find out whether they are finite on every rank."""
        ...

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Clip by the global norm, and note it."""
        ...

    def clip_value(self, optimizer: Optimizer, value: float) -> None:
        """Clip every entry to ``[-value, value]``."""
        ...

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Step the optimizer, or leave everything as it was if a gradient was not finite."""
        ...

    def record(self, found: Tensor) -> None:
        """Count a step that was made elsewhere, with its flag."""
        ...

    def step_with_closure(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """The whole step of an optimizer that evaluates the closure itself; what it returns."""
        ...

    def settle(self, replay: Replay) -> None:
        """Adjust the scale and look at the budget."""
        ...

    def look(self, replay: Replay) -> None:
        """Raise if the budget of skips was passed."""
        ...

    def close_group(self) -> None:
        """``training_step`` is over: optimizers that did not step in it are not waited for."""
        ...

    def release(self) -> None:
        """Undo what must not outlast the run."""
        ...
