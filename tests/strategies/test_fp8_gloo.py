"""``fp8-mixed`` on two processes: every strategy multiplies the same numbers."""

import os
from functools import partial
from typing import Any

import pytest
import torch

from lightning_mp import MixedPrecisionPlan
from support.cells import WHOLE
from support.comparing import eps
from support.fp8 import Across, Plain, plan, run
from support.models import Regression, same_weights
from support.ranks import Ranks
from support.running import fit
from support.sharded import under, whole

pytest.importorskip("torchao")
pytestmark = pytest.mark.gloo
BLOCK = {"wrap": "Block"}
REPLICAS, IN_TWO = ({"device_mesh": mesh, **BLOCK} for mesh in ((2, 1), (1, 2)))
SPLIT = {"tensor_parallel": 2, "tp_plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, **BLOCK}
NORMS = {"*norm*": "fp32"}
#: forward, and both of backward, of four layers in eight steps
PRODUCTS = 4 * 3 * 8


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["losses"] == other["losses"] and torch.equal(one["logits"], other["logits"])


@pytest.mark.parametrize(
    ("strategy", "options", "pins"),
    [
        ("fsdp2", BLOCK, NORMS), ("hsdp", REPLICAS, NORMS), ("fsdp1", BLOCK, {}),
        pytest.param("fsdp2", BLOCK, {}, marks=WHOLE), pytest.param("hsdp", REPLICAS, {}, marks=WHOLE),
    ],
)  # fmt: skip
def test_sharding_changes_no_bit(ranks: Ranks, strategy: str, options: Any, pins: dict[str, str]) -> None:
    whole = ranks.run(Across("ddp", pins=pins))[0]
    found = ranks.run(Across(strategy, pins=pins, options=options))[0]
    assert equal(found, whole)
    assert found["products"] == PRODUCTS
    assert found["layers"] == whole["layers"]
    assert torch.equal(found["logits"], found["validated"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["deepspeed_zero1", "deepspeed_zero2"])
def test_zero_1_and_2_change_no_bit(ranks: Ranks, strategy: str) -> None:
    assert equal(ranks.run(Across(strategy))[0], ranks.run(Across("ddp"))[0])


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "options"), [("deepspeed_zero3", {}), ("fsdp2", SPLIT)])
def test_zero_3_and_tensor_parallel_round_bf16_products_another_way(ranks: Ranks, strategy: str, options: Any) -> None:
    """DeepSpeed's own linear adds the head's bias later, and halves of a split sum are added in bf16."""
    found = ranks.run(Across(strategy, alike=True, options=options))[0]
    whole = run(Plain(), plan())
    assert found["products"] == PRODUCTS
    assert found["losses"] == pytest.approx(whole.losses, abs=eps("bf16-mixed"))


@pytest.mark.parametrize(
    ("strategy", "options", "pins"),
    [
        ("fsdp2", BLOCK, NORMS),
        ("hsdp", IN_TWO, {}),
        pytest.param("fsdp2", BLOCK, {}, marks=WHOLE),
        pytest.param("hsdp", IN_TWO, NORMS, marks=WHOLE),
    ],
)
def test_weights_gathered_in_fp8_change_no_bit(ranks: Ranks, strategy: str, options: Any, pins: dict[str, str]) -> None:
    found = ranks.run(Across(strategy, "tensorwise", pins=pins, options=options, rule={"all_gather": True}))[0]
    assert equal(found, ranks.run(Across("ddp", "tensorwise", pins=pins))[0])
    assert torch.equal(found["logits"], found["validated"])
    assert found["held"] == {"train": "Float8TrainingTensor", "validate": "Tensor"}
    assert found["kept"] == {"Tensor"}


@pytest.mark.parametrize(
    ("strategy", "options", "says"),
    [
        ("fsdp1", BLOCK, "with PlanFSDP1Strategy, which gathers weights as they are stored"),
        ("fsdp2", {"reshard_after_forward": 2, **BLOCK}, "with reshard_after_forward=2"),
        ("fsdp2", {"cpu_offload": True, **BLOCK}, "with cpu_offload=True"),
        ("fsdp2", {"compile": True, **BLOCK}, "with compile=True"),
    ],
)
def test_what_cannot_gather_in_fp8_is_refused(ranks: Ranks, strategy: str, options: Any, says: str) -> None:
    (given,) = ranks.run(Across(strategy, "tensorwise", options=options, rule={"all_gather": True}))[0]
    assert given == f"FP8(all_gather=True) {says}"


optim = pytest.importorskip("torchao.optim")


class DrawsApart(Regression):
    """Each rank's generator stands elsewhere, as without ``seed_everything``."""

    def on_train_start(self) -> None:
        torch.manual_seed(1 + self.global_rank)


def rounded(host: str, seed: int, run: int = 0) -> dict[str, Any]:
    """The ``run``-th run under a seed."""
    os.environ.pop("PL_GLOBAL_SEED", None)  # of another test: Lightning would seed the run by it
    torch.manual_seed(seed)
    module = DrawsApart(partial(optim._AdamW, lr=1e-3, bf16_stochastic_round=True))
    plan = MixedPrecisionPlan("bf16-true")
    options = {"device_mesh": (2, 1)} if host == "hsdp" else {}
    with torch.compiler.set_stance("force_eager"):
        fit(module, **under(host, plan, **options))
    drawn = torch.rand(())
    module.on_train_start()
    return {"weights": whole(module), "drawn": drawn, "expected": torch.rand(())}


@pytest.mark.parametrize("host", ["ddp", "hsdp"])
def test_replicas_round_alike_by_the_runs_seed_and_generators_are_left_alone(ranks: Ranks, host: str) -> None:
    one, other = ranks.call(rounded, host, 0)
    assert same_weights(one["weights"], other["weights"])
    for found in (one, other):
        assert torch.equal(found["drawn"], found["expected"])
    again, apart = ranks.call(rounded, host, 0, 1)[0], ranks.call(rounded, host, 1)[0]
    assert same_weights(one["weights"], again["weights"])
    assert not same_weights(one["weights"], apart["weights"])
