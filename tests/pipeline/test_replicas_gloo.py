"""Four processes: four stages, or two stages of two replicas, whole or sharded with FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.comparing import eps, same
from support.pipeline import Fit
from support.ranks import Ranks

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

#: of sums over replicas, in another order than on one process
WITHIN = 1e-6
SHARD = (("shard", True),)
#: after the third batch, of windows of two
INSIDE = (("val_check_interval", 3),)
BAD = ((1, "blocks.0.up.weight"), (2, "head.bias"))
PINS = ("pins", {"*norm*": "fp32", "lm_head": "fp32"})

FITS = {
    "four stages, gpipe, one overflows alone": Fit("16-mixed", "gpipe", stages=4, scale=64.0, bad=BAD),
    "replicas, clipped, bf16": Fit("bf16-mixed", replicas=2, clip=0.1, accumulate=2),
    "replicas, Llama, interleaved, fp16": Fit("16-mixed", "interleaved_1f1b", "llama", replicas=2, scale=2.0**12),
    "sharded, accumulated, one stage overflows alone": Fit(
        "16-mixed", "gpipe", replicas=2, options=SHARD, scale=64.0, bad=BAD, accumulate=2, steps=8
    ),
    "sharded, validated inside a window": Fit(replicas=2, options=SHARD, accumulate=2, steps=6, arguments=INSIDE),
    "sharded, fitted twice": Fit(replicas=2, options=SHARD, accumulate=2, steps=4, fits=2),
    "sharded, interleaved, with pins": Fit(
        "bf16-mixed", "interleaved_1f1b", "llama", replicas=2, options=SHARD, plan=(PINS,), clip=0.1
    ),
}


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as started:
        yield started


def _gradients(results: list[dict[str, Any]], step: int) -> dict[str, Any]:
    return {name: gradient for result in results for name, gradient in result["gradients"][step].items()}


@pytest.mark.parametrize("name", FITS)
def test_it_is_the_fit_on_one_process(name: str, four: Ranks) -> None:
    fit = FITS[name]
    results, alone = four.run(fit), fit.alone()
    one_order = fit.replicas == 1
    # what comes after the first applied step is computed from weights that another order has moved
    within, later = (0.0, 0.0) if one_order else (WITHIN, eps(fit.precision) if "32" not in fit.precision else WITHIN)
    first = True
    for step, expected in enumerate(alone["gradients"]):
        if all(gradient.isfinite().all() for gradient in expected.values()):
            assert same(_gradients(results, step), expected, within if first else later), step
            first = False
    assert not first
    for key in ("weights", "optimizer"):
        assert same(results[0][key], alone[key], 10 * later), key
    for key in ("counts", "scale", "steps", "rates"):
        assert {result[key] for result in results} == {alone[key]}, key
    if fit.clip is not None:
        assert [result["norm"] for result in results] == [pytest.approx(alone["norm"], rel=WITHIN)] * 4
    assert len({result["metrics"]["val_loss"] for result in results}) == 1
