"""One rank's gradient stops being finite after the backward pass: every rank skips, and they stay together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from lightning_mp import LossScaling, NonFinite, NonFiniteError
from lightning_mp.numerics.grads import local
from support.manual import Manual
from support.models import same_weights
from support.oracles import plan_for
from support.ranks import Ranks
from support.running import fit
from support.sharded import BAD_RANK, HOSTS, Ranked, whole
from support.traces import Trace

pytestmark = pytest.mark.gloo

BAD = 3


def _spoil(module: Any) -> None:
    if module.global_rank == BAD_RANK and module.trainer.global_step == BAD:
        for parameter in module.parameters():
            if parameter.grad is not None and local(parameter.grad).numel():
                local(parameter.grad).view(-1)[0] = float("inf")


class ByHook(Ranked):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        _spoil(self)


def between(m: Any, batch: Any, batch_idx: int) -> None:
    opt = m.optimizers()
    opt.zero_grad()
    m.manual_backward(m.loss((batch[0] * (1 + m.global_rank), batch[1])))
    _spoil(m)
    opt.step()


@dataclass(frozen=True)
class Changed:
    """By a hook, or between ``manual_backward`` and ``step``. With ``allowed=0`` the run ends with an error."""

    host: str
    mode: str
    by_hand: bool = False
    allowed: int = 100

    def run(self) -> dict[str, Any]:
        rule = LossScaling.static(64.0)
        plan, trace = plan_for(self.mode, rule, nonfinite=NonFinite(max_consecutive=self.allowed)), Trace()
        module = Manual(between) if self.by_hand else ByHook()
        named = None
        try:
            fit(module, plugins=[plan], callbacks=[trace], **HOSTS[self.host]())
        except NonFiniteError as error:
            named = error.rank, error.parameter, "changed after the backward pass" in str(error)
        return {"skipped": trace.skipped, "weights": whole(module), "named": named}


CASES = [Changed(host, mode) for host, mode in (("ddp", "bf16-mixed"), ("fsdp1", "16-mixed"), ("fsdp2", "bf16-mixed"))]
CASES += [Changed(host, "16-mixed", by_hand=True) for host in ("ddp", "fsdp2")]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_every_rank_skips(ranks: Ranks, case: Changed) -> None:
    one, other = ranks.run(case)
    assert one["skipped"] == other["skipped"] == [step == BAD for step in range(8)]
    assert same_weights(one["weights"], other["weights"])
    assert all(bool(weight.isfinite().all()) for weight in one["weights"].values())


@pytest.mark.parametrize("host", ["ddp", "fsdp2"])
def test_the_error_names_the_rank_that_changed_it(ranks: Ranks, host: str) -> None:
    one, other = ranks.run(Changed(host, "bf16-mixed", allowed=0))
    assert one["named"] == other["named"]
    rank, parameter, changed = one["named"]
    assert rank == BAD_RANK
    assert parameter.startswith("net.")
    assert changed
