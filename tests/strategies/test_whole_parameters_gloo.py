"""Optimizers whose step depends on the parameter as a whole, where each rank holds a piece: right, or refused."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad, clip_grad_norm_

from conformance.optimizers import Lamb, Lion
from lightning_mp import PlanError
from support.comparing import furthest, of_training, same
from support.models import Regression
from support.optimizers import Around
from support.ranks import Ranks
from support.sharded import RATE, ddp, fsdp1, fsdp2, on, trained

pytestmark = pytest.mark.gloo

MADE: dict[str, Any] = {
    "LAMB": partial(Lamb, lr=RATE),
    "Lion": partial(Lion, lr=RATE),
    "Adafactor": partial(torch.optim.Adafactor, lr=RATE),
    "LAMB, wrapped": lambda parameters: Around(Lamb(parameters, lr=RATE)),
    "AdamW, wrapped": lambda parameters: Around(torch.optim.AdamW(parameters, lr=RATE, eps=1e-4)),
}
SGD_ = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
REFUSED = {("fsdp1", "LAMB"), ("fsdp1", "LAMB, wrapped"), ("fsdp1", "Adafactor"), ("fsdp2", "Adafactor")}
CASES = [(host, name) for host in ("fsdp1", "fsdp2") for name in MADE]


@dataclass(frozen=True)
class Case:
    host: str
    optimizer: str

    def run(self) -> Any:
        hosts = {"ddp": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2}
        host = hosts[self.host]() if self.host in hosts else on(self.host)
        try:
            return trained("32-true", host, Regression(MADE[self.optimizer]))["weights"]
        except PlanError as error:
            return error.faults[0].given


@pytest.mark.parametrize(("host", "optimizer"), CASES)
def test_it_trains_as_under_ddp_or_is_refused(ranks: Ranks, host: str, optimizer: str) -> None:
    for found, expected in zip(ranks.run(Case(host, optimizer)), ranks.run(Case("ddp", optimizer)), strict=True):
        if (host, optimizer) in REFUSED:
            assert ("around" if "wrapped" in optimizer else optimizer.lower()) in found.lower()
            assert "on sharded parameters, wh" in found
        else:
            assert furthest(found, expected) <= of_training("32-true", RATE)


class Clipped(Regression):
    """Clips by itself."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip_grad_norm_(self.parameters(), 0.05)
        self.lrs.append(float(clip_grad_norm_(list(self.net[0].parameters()), 10.0, norm_type=float("inf"))))


@dataclass(frozen=True)
class Clips:
    host: str

    def run(self) -> Any:
        found = trained("32-true", {"ddp": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2}[self.host](), Clipped(SGD_))
        return {key: found[key] for key in ("weights", "lrs")} | {"restored": clip_grad._get_total_norm.__module__}


@pytest.mark.parametrize("host", ["fsdp1", "fsdp2"])
def test_the_users_own_clip_grad_norm_takes_the_norm_of_all_shards(ranks: Ranks, host: str) -> None:
    for found, expected in zip(ranks.run(Clips(host)), ranks.run(Clips("ddp")), strict=True):
        assert same(found["weights"], expected["weights"], 1e-5)
        assert found["restored"] == expected["restored"]
        if host == "fsdp1":  # of FSDP2's norm, a DTensor, float() reads this rank's
            assert same(found["lrs"], expected["lrs"], 1e-5)
