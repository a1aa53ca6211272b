"""What each rank of a run does whose gradient is changed on one rank after the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_mp import LossScaling, NonFinite, NonFiniteError
from lightning_mp.numerics.grads import local
from support.manual import Manual
from support.oracles import plan_for
from support.running import fit
from support.sharded import BAD_RANK, HOSTS, Ranked, whole
from support.traces import Trace

BAD = 3


def _spoil(module: Any) -> None:
    if module.global_rank == BAD_RANK and module.trainer.global_step == BAD:
        for parameter in module.parameters():
            if parameter.grad is not None and local(parameter.grad).numel():
                local(parameter.grad).view(-1)[0] = float("inf")


class _ByHook(Ranked):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        _spoil(self)


def _between(m: Any, batch: Any, batch_idx: int) -> None:
    opt = m.optimizers()
    opt.zero_grad()
    m.manual_backward(m.loss((batch[0] * (1 + m.global_rank), batch[1])))
    _spoil(m)
    opt.step()


@dataclass(frozen=True)
class Changed:
    """``by`` a hook, or between ``manual_backward`` and ``step``.

    With ``allowed=0`` the run ends with an error.
    """

    host: str
    mode: str
    by: str = "hook"
    allowed: int = 100

    def run(self) -> dict[str, Any]:
        rule = LossScaling.static(64.0)
        plan, trace = plan_for(self.mode, rule, nonfinite=NonFinite(max_consecutive=self.allowed)), Trace()
        module = _ByHook() if self.by == "hook" else Manual(_between)
        named = None
        try:
            fit(module, plugins=[plan], callbacks=[trace], **HOSTS[self.host]())
        except NonFiniteError as error:
            named = error.rank, error.parameter, "changed after the backward pass" in str(error)
        weights: dict[str, Tensor] = whole(module)
        return {"skipped": trace.skipped, "weights": weights, "named": named}
