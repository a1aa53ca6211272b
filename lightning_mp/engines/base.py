"""What every engine can be asked: the life of one step, in the order of the calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.errors import Faults
from lightning_mp.numerics.ledger import StepLedger
from lightning_mp.numerics.scaler import LossScaler

#: runs the last batch forward and backward again, without summing over ranks, to find what broke it; or cannot
Replay = Callable[[], Tensor | None] | None


class StepEngine(Protocol):
    """Carries one policy out on one kind of strategy."""

    ledger: StepLedger
    scaler: LossScaler | None

    def check(self, module: nn.Module, faults: Faults) -> None:
        """Note what in ``module`` the policy cannot be carried out on; change nothing."""
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

    def after_backward(self, *, manual: bool) -> None:
        """Bring gradients into the state in which users may look at them."""
        ...

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring gradients into true units and find out whether they are finite on every rank."""
        ...

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Clip by the global norm; the norm before."""
        ...

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Step the optimizer, or leave everything as it was if a gradient was not finite."""
        ...

    def settle(self, replay: Replay) -> None:
        """Adjust the scale and look at the budget."""
        ...

    def release(self) -> None:
        """Undo what must not outlast the run."""
        ...
