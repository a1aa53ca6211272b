"""Counted FLOPs against arithmetic on paper, with and without everything that computes a second time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_mp.errors import Faults
from lightning_mp.modules import checkpointing
from lightning_mp.monitor.health.flops import CountFlops
from lightning_mp.policy import Checkpointing
from support.language import LENGTH, VOCABULARY, WIDTH, gpt2

ROWS, IN, HIDDEN, OUT = 4, 8, 16, 6
#: a product's FLOPs: two a multiplication and addition
FIRST, SECOND = 2 * ROWS * IN * HIDDEN, 2 * ROWS * HIDDEN * OUT
HEADS, SEQUENCE, DIM = 2, 16, 8
PRODUCT = 2 * ROWS * HEADS * SEQUENCE * SEQUENCE * DIM


def counted(run: Callable[[], Any]) -> int:
    with CountFlops() as flops:
        run()
    return flops.total


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUT))


def train(forward: Callable[[Tensor], Tensor], *, inputs: bool = False) -> None:
    forward(torch.randn(ROWS, IN, requires_grad=inputs)).sum().backward()


def second_derivative(model: nn.Module) -> None:
    x = torch.randn(ROWS, IN, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()


def test_a_net_costs_what_paper_says() -> None:
    """Forward, the weights' gradients, and the inputs' where someone wants them."""
    assert counted(lambda: train(net())) == (FIRST + SECOND) * 2 + SECOND
    assert counted(lambda: train(net(), inputs=True)) == (FIRST + SECOND) * 3


def test_a_convolution_costs_what_paper_says() -> None:
    layer, image = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    once = 2 * 2 * (6 * 6) * 4 * (3 * 3 * 3)
    assert counted(lambda: layer(image).sum().backward()) == 2 * once


@pytest.mark.parametrize("causal", [False, True])
def test_attention_on_a_cpu_costs_its_two_products_and_four_behind(causal: bool) -> None:
    q = torch.randn(ROWS, HEADS, SEQUENCE, DIM, requires_grad=True)
    run = partial(functional.scaled_dot_product_attention, q, q, q, is_causal=causal)
    assert counted(lambda: run().sum().backward()) == 6 * PRODUCT


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_recomputed_is_not_counted(reentrant: bool) -> None:
    model = net()
    again = partial(checkpoint, model, use_reentrant=reentrant)
    assert counted(lambda: train(again, inputs=True)) == counted(lambda: train(model, inputs=True))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointing_by_module_changes_nothing(mode: Any) -> None:
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))

    def run(model: Any) -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    plain, again = gpt2().train(), gpt2().train()
    config = Checkpointing(modules="GPT2Block", mode=mode)
    checkpointing.apply(again, checkpointing.select(again, config, Faults()), config)
    assert counted(lambda: run(again)) == counted(lambda: run(plain))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_language_model_costs_six_a_weight_and_token_and_its_attention(attention: str) -> None:
    """Whatever computes the attention: what a fused one computes again in the backward pass is not the model's."""
    model, tokens = gpt2(attn_implementation=attention), 2 * LENGTH
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    matrices = 2 * 12 * WIDTH * WIDTH + VOCABULARY * WIDTH
    products = 2 * 6 * 2 * tokens * LENGTH * WIDTH  # in two layers, two products and four behind

    def run() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    assert counted(run) == 6 * matrices * tokens + products


def test_a_second_derivative_is_counted() -> None:
    """Gradients are on in the backward pass there too, but nothing is computed again."""
    model = net()
    first = (FIRST + SECOND) * 2  # forward and the inputs' gradient
    assert counted(lambda: second_derivative(model)) > first + FIRST + SECOND


def test_compiled_code_is_counted_and_stays_compiled() -> None:
    compiled = torch.compile(net(), backend="aot_eager", fullgraph=True)
    expected = (FIRST + SECOND) * 2 + SECOND
    assert [counted(lambda: train(compiled)) for _ in range(2)] == [expected, expected]


def test_a_rule_that_fails_is_named_and_ends_nothing() -> None:
    q = torch.randn(1, 4, 8, 8)
    with CountFlops() as flops:
        torch.mm(torch.ones(2, 3), torch.ones(3, 2))
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        flops.rules = {op._overloadpacket: lambda *_, **__: 1 // 0}
        op(q, q, q)
    assert flops.total == 2 * 2 * 3 * 2
    assert flops.uncounted == {str(op)}
