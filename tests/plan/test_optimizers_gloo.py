"""Optimizers that are not torch's, on two ranks: a bad step of one is skipped by all, a second pass is refused."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import optim

from lightning_mp import PlanError
from support.models import batches
from support.optimizers import CLAIM_TO_SKIP
from support.oracles import plan_for
from support.ranks import Ranks
from support.running import fit
from support.sharded import HOSTS, Ranked, whole

pytestmark = pytest.mark.gloo


class Other(Ranked):
    def __init__(self, optimizer: Any, bad: tuple[int, ...] = ()) -> None:
        super().__init__(bad)
        self.make_optimizer = optimizer


def skips(host: str) -> dict[str, Any]:
    """By mode and optimizer: how many steps were applied and skipped, and whether the weights are finite."""
    ended: dict[str, Any] = {}
    for mode in ("32-true", "16-mixed"):
        for name, optimizer in CLAIM_TO_SKIP.items():
            module, plan = Other(optimizer, bad=(1,)), plan_for(mode)
            fit(module, data=batches(24), plugins=[plan], **HOSTS[host]())
            finite = all(bool(weight.isfinite().all()) for weight in whole(module).values())
            ended[f"{mode} {name}"] = plan.applied_steps, plan.skipped_steps, finite
    return ended


@pytest.mark.parametrize("host", ["ddp", "fsdp2"])
def test_a_bad_step_is_skipped_whatever_an_optimizer_says_of_itself(ranks: Ranks, host: str) -> None:
    for ended in ranks.call(skips, host):
        assert ended == dict.fromkeys(ended, (2, 1, True))


class Sharp(optim.SGD):
    """Evaluates where it is and where it climbed to."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)()
        held = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        climbed = [0.05 * one.grad for one in held]
        for one, far in zip(held, climbed, strict=True):
            one.add_(far)
        torch.enable_grad()(closure)()
        for one, far in zip(held, climbed, strict=True):
            one.sub_(far)
        super().step()
        return loss


def second_pass(host: str, mode: str) -> str:
    try:
        fit(Other(partial(Sharp, lr=1e-3)), data=batches(24), plugins=[plan_for(mode)], **HOSTS[host]())
    except PlanError as error:
        return str(error)
    return "it ran"


@pytest.mark.parametrize(
    ("host", "mode", "said"),
    [
        ("ddp", "bf16-mixed", "it ran"),
        ("ddp", "16-mixed", "Sharp, which evaluates its closure again, with precision='16-mixed'"),
        ("fsdp2", "bf16-mixed", "Sharp, which evaluates its closure again, on sharded parameters"),
    ],
)
def test_a_second_pass_runs_under_ddp_and_is_refused_on_shards(ranks: Ranks, host: str, mode: str, said: str) -> None:
    for answer in ranks.call(second_pass, host, mode):
        assert said in answer
