"""The parts of a reading: norms, the loss scale and skips wherever they are kept, FLOPs, and the way to the host."""

import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_mp.health import measurement
from lightning_mp.health.measurement import Shard, copied, memory
from lightning_mp.health.scale_sources import DeepSpeedSource, SkipCount
from lightning_mp.health.throughput import CountFlops
from support.language import LENGTH, VOCABULARY, WIDTH, gpt2

CPU = torch.device("cpu")


def shards(*tensors: Tensor) -> list[Shard]:
    return [Shard(tensor, ()) for tensor in tensors]


def norm(*tensors: Tensor) -> float:
    return float(torch.cat([tensor.double().flatten() for tensor in tensors]).norm())


def test_of_a_large_parameter_pieces_from_all_of_it_are_kept() -> None:
    large = torch.randn(3 * measurement.PIECES * measurement.PIECE + 5)
    (shard,) = copied(shards(large)).values()
    assert norm(shard.tensor) == pytest.approx(norm(large) / 3**0.5, rel=0.05)
    assert shard.tensor[-1, -1] in large[-large.numel() // 16 :]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is resident now")
def test_on_a_cpu_memory_is_what_the_process_holds_and_its_peak() -> None:
    before, _ = memory(CPU)
    held = torch.ones(2**27)  # half a GiB
    assert before is not None
    now, peak = memory(CPU)
    assert now == pytest.approx(before + held.nbytes / 2**30, abs=0.1)
    assert peak is not None
    assert peak >= before + held.nbytes / 2**30 - 0.1
    assert memory(torch.device("meta")) == (None, None)


traces = st.lists(st.booleans(), min_size=1, max_size=12)


def expected(trace: list[bool]) -> list[tuple[int, bool]]:
    return [*zip(accumulate(trace), trace, strict=True)]


class Engine:
    """A ``DeepSpeedEngine`` as far as it is asked, around DeepSpeed's own scaler."""

    def __init__(self, scaler: Any, fp16: bool = True) -> None:
        self.optimizer = type("Optimizer", (), {"loss_scaler": scaler})()
        self.skipped_steps, self._fp16 = 0, fp16

    def fp16_enabled(self) -> bool:
        return self._fp16


@settings(max_examples=20)
@given(trace=traces)
def test_deepspeeds_own_scaler(trace: list[bool]) -> None:
    host = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    scaler = host.DynamicLossScaler(2.0**10, 3, 2.0, 2, False, raise_error_at_min_scale=False)
    engine = Engine(scaler)
    source = DeepSpeedSource(engine)
    skips = SkipCount(source)
    for overflow, counts in zip(trace, expected(trace), strict=True):
        skips.before_step()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(host.dist, "get_rank", lambda: 1)  # it asks who is to print
            scaler.update_scale(overflow)
        engine.skipped_steps += overflow
        skips.after_batch()
        assert (skips.total, skips.skipped_last) == counts
        assert (source.scale(), source.floor) == (scaler.cur_scale, 2.0)


ROWS, IN, HIDDEN, OUT = 4, 8, 16, 6
#: a product's FLOPs: two a multiplication and addition
FIRST, SECOND = 2 * ROWS * IN * HIDDEN, 2 * ROWS * HIDDEN * OUT
HEADS, SEQUENCE, DIM = 2, 16, 8


def flops_of(run: Callable[[], Any]) -> int:
    with CountFlops() as flops:
        run()
    return flops.total


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUT))


def train(forward: Callable[[Tensor], Tensor], *, inputs: bool = False) -> None:
    forward(torch.randn(ROWS, IN, requires_grad=inputs)).sum().backward()


def test_a_net_costs_what_paper_says() -> None:
    assert flops_of(lambda: train(layers())) == (FIRST + SECOND) * 2 + SECOND
    assert flops_of(lambda: train(layers(), inputs=True)) == (FIRST + SECOND) * 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_recomputed_is_not_flops_of(reentrant: bool) -> None:
    model = layers()
    again = partial(checkpoint, model, use_reentrant=reentrant)
    assert flops_of(lambda: train(again, inputs=True)) == flops_of(lambda: train(model, inputs=True))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_language_model_costs_six_a_weight_and_token_and_its_attention(attention: str) -> None:
    """Whatever computes the attention: what a fused one computes again in the backward pass is not the model's."""
    model, tokens = gpt2(attn_implementation=attention), 2 * LENGTH
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    matrices = 2 * 12 * WIDTH * WIDTH + VOCABULARY * WIDTH
    products = 2 * 6 * 2 * tokens * LENGTH * WIDTH  # in two layers, two products and four behind

    def run() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    assert flops_of(run) == 6 * matrices * tokens + products
