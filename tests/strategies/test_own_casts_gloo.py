"""Casts by a module's own ``_apply``, and ``self.dtype``, are on every strategy what they are on one device."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lightning_mp import PlanError
from lightning_mp.numerics.dtypes import default_dtype
from support.hf import MODELS, loss_of, token_batches
from support.models import FEATURES, batches
from support.oracles import plan_for
from support.own_apply import CASES
from support.ranks import Ranks
from support.running import fit
from support.sharded import Language, Ranked, under

BF16 = torch.bfloat16
HOSTS = ("ddp", "fsdp2", "fsdp1", "deepspeed_zero2")
#: a unit has one dtype
REFUSED = {("fsdp2", "KeepsAParameter"), ("fsdp1", "KeepsAParameter")}


class Casting(Ranked):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(optimizer="sgd")
        self.net.insert(0, inner)
        self.net.insert(0, nn.Linear(FEATURES, FEATURES))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return (self.net(x.double().to(self.dtype)).float() - y.float()).pow(2).mean()


def _first_loss(case: str, dtype: torch.dtype) -> float:
    """The loss of rank 0's first batch, computed in a plain module that ``to(dtype)`` cast."""
    torch.manual_seed(0)
    module = Casting(CASES[case]()).to(dtype)
    x, y = next(iter(batches()))
    with default_dtype(dtype):
        return (module.net(x.to(dtype)).float() - y.to(dtype).float()).pow(2).mean().item()


def _ran(host: str) -> dict[str, Any]:
    """By case, the first loss and the dtypes of the module and of its last linear layer; or why it was refused."""
    found = dict[str, Any]()
    for case, make in CASES.items():
        torch.manual_seed(0)
        module, options = Casting(make()), {"wrap": "Linear"} if "fsdp" in host else {}
        try:
            fit(module, max_steps=2, **under(host, plan_for("bf16-true"), **options))
        except PlanError as error:
            found[case] = str(error)
        else:
            found[case] = module.losses[0], module.dtype, module.net[-1].weight.dtype
    return found


def _rotary(host: str) -> tuple[torch.dtype, float]:
    """The dtype of a Llama's frequencies after a run, and the first loss."""
    module = Language("llama")
    fit(module, data=token_batches(), max_steps=2, **under(host, plan_for("bf16-true")))
    return module.model.model.rotary_emb.inv_freq.dtype, module.losses[0]


@pytest.mark.gloo
@pytest.mark.parametrize("host", [*HOSTS[:2], *(pytest.param(host, marks=pytest.mark.slow) for host in HOSTS[2:])])
def test_rotary_frequencies_stay_in_fp32(ranks: Ranks, host: str) -> None:
    model = MODELS["llama"]().to(BF16)
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)
    with default_dtype(BF16):
        expected = loss_of(model, next(iter(token_batches()))).item()
    assert ranks.call(_rotary, host)[0] == (torch.float32, expected)


@pytest.mark.gloo
@pytest.mark.parametrize("host", [*HOSTS[:2], *(pytest.param(host, marks=pytest.mark.slow) for host in HOSTS[2:])])
def test_it_is_cast_as_on_one_device_or_refused_with_the_pin_to_write(ranks: Ranks, host: str) -> None:
    found = ranks.call(_ran, host)[0]
    for case in CASES:
        if (host, case) in REFUSED:
            assert "'net.1.decay'" in found[case]
            assert "pins={'KeepsAParameter': 'fp32'}" in found[case]
        else:
            assert found[case] == (_first_loss(case, BF16), BF16, BF16), case
