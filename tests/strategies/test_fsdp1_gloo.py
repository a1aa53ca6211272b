"""FSDP1 under a plan, in real processes: the weights are DDP's, the dtypes the plan's, the checkpoints anybody's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.plugins import FSDPPrecision
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from lightning_mp import LossScaling, NonFinite, PlanError
from lightning_mp.strategies.fsdp1 import PlanFSDP1Strategy
from support import hf
from support.comparing import of_training, same_runs
from support.fsdp2_ways import Again
from support.manual import Manual
from support.models import same_weights
from support.oracles import CALM_SCALE, MODES, SCALED, plan_for
from support.ranks import Ranks
from support.running import fit
from support.saving import ResumableBatches, SaveAt
from support.sharded import BAD_RANK, PINS, RATE, Both, Language, Ranked, RefusedWay, Stopped, ddp, fsdp1, trained

pytestmark = pytest.mark.gloo

BAD_STEP = 2
CLIP = {"gradient_clip_val": 0.5}
BY_VALUE = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
Even = partial(Ranked, even=True)
OVERFLOWS = partial(Even, bad=(BAD_STEP,), schedule=True)


class Frozen(Ranked):
    """Some parameters do not train, and groups are by ``dim()``."""

    def __init__(self) -> None:
        super().__init__(optimizer="groups", even=True)
        self.net[0].requires_grad_(False)
        self.net[1].bias.requires_grad_(False)


def _both(mode: str, module: Any = Even, options: Any = (), **strategy: Any) -> Both:
    return Both(mode, module, dict(options), strategy, "fsdp1")


SHARDINGS: dict[str, dict[str, Any]] = {
    "grad op": {"sharding_strategy": "SHARD_GRAD_OP"},
    "no shard": {"sharding_strategy": "NO_SHARD"},
    "classes": {"wrap": None, "auto_wrap_policy": {nn.Linear}},
    "size": {"wrap": None, "auto_wrap_policy": partial(size_based_auto_wrap_policy, min_num_params=100)},
    "root only": {"wrap": None},
    "cpu offload": {"cpu_offload": True},
}
LLAMA = {"data": hf.token_batches(8), "checkpointing": "LlamaDecoderLayer"}
#: what is DDP's but for the order of sums
NEAR: dict[str, Both] = {
    **{name: _both("16-mixed", OVERFLOWS, CLIP, **strategy) for name, strategy in SHARDINGS.items()},
    **{f"norm {mode}": _both(mode, options=CLIP) for mode in MODES},
    "value": _both("bf16-mixed", options=BY_VALUE),
    "accumulate": _both("bf16-mixed", options={"accumulate_grad_batches": 2}),
    "groups": _both("bf16-mixed", partial(Even, optimizer="groups")),
    "frozen": _both("bf16-mixed", Frozen, CLIP),
    "no part of a parameter": _both("16-mixed", partial(Ranked, bad=(0,))),
    "llama": _both("bf16-true", partial(Language, "llama"), LLAMA, wrap=None),
}


@pytest.mark.parametrize(("mode", "optimizer"), [*((mode, "fused") for mode in MODES), ("16-mixed", "momentum")])
def test_weights_are_those_of_ddp_bit_for_bit(ranks: Ranks, mode: str, optimizer: str) -> None:
    """And one rank's overflow is everybody's skip."""
    one, other = ranks.run(_both(mode, partial(OVERFLOWS, optimizer=optimizer)))
    for result in (one, other):
        ours, expected = result["sharded"], result["ddp"]
        assert ours["skipped"] == [step == BAD_STEP for step in range(8)]
        assert ours["counts"] == (7, 1)
        assert ours["losses"] == expected["losses"]
        assert ours["lrs"] == expected["lrs"]
        assert ours["lrs"][BAD_STEP] == ours["lrs"][BAD_STEP + 1]
        halved = [CALM_SCALE] * BAD_STEP + [CALM_SCALE / 2] * (8 - BAD_STEP)
        assert ours["scales"] == (halved if mode in SCALED else [])
        assert same_weights(ours["weights"], expected["weights"])
    assert same_weights(one["sharded"]["weights"], other["sharded"]["weights"])


@pytest.mark.parametrize("case", NEAR)
def test_options_optimizers_and_models_mean_what_they_mean_under_ddp(ranks: Ranks, case: str) -> None:
    one, other = ranks.run(NEAR[case])
    for result in (one, other):
        assert same_runs(result["sharded"], result["ddp"], of_training(NEAR[case].mode, RATE))
        by_norm = NEAR[case].options.get("gradient_clip_val") == 0.5
        assert any(map(math.isfinite, result["sharded"]["norms"])) == by_norm
    assert same_weights(one["sharded"]["weights"], other["sharded"]["weights"])


# ------------------------------------------------------------------ dtypes and starts


# ------------------------------------------------------------------ checkpoints and several runs


@dataclass(frozen=True)
class Saved:
    """One host saves after step 4 and runs to the end; then each host goes on from what was saved."""

    folder: Path
    saver: str
    optimizer: str

    def run(self) -> dict[str, Any]:
        hosts: dict[str, Callable[[], Any]] = {"ddp": ddp, "fsdp1": fsdp1}
        scaling = LossScaling(init_scale=32.0, hysteresis=2, growth_interval=5)

        def run(host: str, bad: tuple[int, ...] = (), **options: Any) -> dict[str, Any]:
            options |= {"loss_scaling": scaling, "data": ResumableBatches()}
            return trained("16-mixed", hosts[host](), Even(bad, self.optimizer), **options)

        save = SaveAt(self.folder / f"{self.saver} {self.optimizer}", 4)
        runs = {"to the end": run(self.saver, (1,), callbacks=[save])}
        path = save.folder / "4.ckpt"
        for host in hosts:
            runs[host] = run(host, ckpt_path=path)
        return {"runs": runs, "notes": torch.load(path, weights_only=False).get("lightning_mp")}


@pytest.mark.parametrize("how", [("fsdp1", "groups"), ("ddp", "groups"), ("fsdp1", "sgd")], ids=" ".join)
def test_a_run_goes_on_from_its_checkpoint_under_either_strategy(
    ranks: Ranks, tmp_path: Path, how: tuple[str, str]
) -> None:
    for result in ranks.run(Saved(tmp_path, *how)):
        runs = result["runs"]
        for name in runs:
            assert runs[name]["counts"] == (7, 1)
            assert runs[name]["scales"][-4:] == runs["to the end"]["scales"][-4:]
            assert same_weights(runs[name]["weights"], runs["to the end"]["weights"]), name
        if how[0] == "fsdp1":
            assert result["notes"]["strategy"] == "PlanFSDP1Strategy"
            assert set(result["notes"]["dtypes"]) == {"net.0.weight", "net.1.weight", "net.1.bias", "net.3.weight"}


def test_a_fitted_module_is_evaluated(ranks: Ranks) -> None:
    for result in ranks.run(Again("once", "fsdp1", even=True, pins=())):
        assert result["sharded"]["losses"] == result["ddp"]["losses"]
        assert same_weights(result["sharded"]["weights"], result["ddp"]["weights"])


def test_the_error_names_rank_and_module(ranks: Ranks) -> None:
    one, other = ranks.run(Stopped("bf16-mixed", "batch", NonFinite(max_consecutive=2), fsdp1))
    assert one == other
    assert (one["rank"], one["step"], one["module"]) == (BAD_RANK, 4, "net.0")
    assert "_fsdp" not in one["message"]


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mixed_precision": MixedPrecision(reduce_dtype=torch.float16)}, "mixed_precision="),
        ({"activation_checkpointing_policy": {nn.Linear}}, "checkpointing='"),
        ({"wrap": "Linear", "auto_wrap_policy": {nn.Linear}}, "wrap='Linear'"),
        ({"use_orig_params": False}, "use_orig_params=False"),
        ({"state_dict_type": "sharded"}, "state_dict_type='sharded'"),
        ({"ignored_states": []}, "ignored_states= with FSDP1. Use strategy='mp_fsdp2'"),
        ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": (1, 2)}, "mp_hsdp"),
        ({"mixed_precision": MixedPrecision(), "activation_checkpointing": nn.Linear}, "2 faults"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_contradicts_a_plan_is_refused_at_construction(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as error:
        PlanFSDP1Strategy(**options)
    assert said.lower() in str(error.value).lower()


class Wrapped(Ranked):
    """It wraps a layer itself."""

    def configure_model(self) -> None:
        if not isinstance(self.net[0], FullyShardedDataParallel):
            self.net[0] = FullyShardedDataParallel(self.net[0], device_id=torch.device("cpu"))


class Holds(Ranked):
    """It holds one parameter more."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.ones(3, **options), requires_grad=False)


class Finetuned(Ranked):
    """It has the backbone that Lightning's callback asks for."""

    @property
    def backbone(self) -> nn.Module:
        return self.net[0]


def _fitted(module: Any, options: Any = (), mode: str = "bf16-mixed", pins: Any = None, **strategy: Any) -> Any:
    return fit(module, plugins=[plan_for(mode, pins=pins)], **dict(options), **fsdp1(**strategy))


def _twice() -> None:
    module = Even()
    _fitted(module)
    _fitted(module)


WAYS: dict[str, Callable[[], Any]] = {
    "pins": lambda: _fitted(Ranked(), pins=PINS),
    "finetuning": lambda: _fitted(Finetuned(), {"callbacks": [BackboneFinetuning()]}),
    "wrapped": lambda: _fitted(Wrapped()),
    "integer": lambda: _fitted(Holds(dtype=torch.int8)),
    "meta": lambda: _fitted(Holds(device="meta")),
    "manual": lambda: _fitted(Manual()),
    "no plan": lambda: fit(Ranked(), plugins=[FSDPPrecision("bf16-mixed")], **fsdp1()),
    "wrap": lambda: _fitted(Ranked(), wrap="Lineal"),
    "another fit": _twice,
}
SAID = {
    "pins": ("pins with FSDP1", "mp_fsdp2"),
    "finetuning": ("BackboneFinetuning with FSDP1's flat parameters",),
    "wrapped": ("wrapped in FullyShardedDataParallel already", "configure_model"),
    "integer": ("'more' in int8", "mp_fsdp2"),
    "meta": ("'more' on the meta device", "mp_fsdp2"),
    "manual": ("automatic_optimization=False",),
    "no plan": ("PlanFSDP1Strategy with FSDPPrecision", "MixedPrecisionPlan"),
    "wrap": ("'Lineal'", "'Linear'"),
    "another fit": ("of a module that FSDP1 wrapped", "Make a new module"),
}


@pytest.mark.parametrize("which", WAYS)
def test_what_cannot_run_is_refused_before_the_first_step(ranks: Ranks, which: str) -> None:
    for message in ranks.run(RefusedWay(__name__, which)):
        assert all(text.lower() in message.lower() for text in SAID[which]), message
