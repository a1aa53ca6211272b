"""FSDP1 under a plan, in real processes: the weights are DDP's, the dtypes the plan's, the checkpoints anybody's."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

from lightning_mp import MixedPrecisionPlan, PlanError, make_strategy
from support.comparing import of_training, same_runs
from support.manual import Manual
from support.models import FEATURES, batches, same_weights
from support.oracles import plan_for
from support.ranks import Ranks
from support.running import fit, trainer
from support.sharded import PINS, RATE, Both, Ranked, fsdp1, refused_way

pytestmark = pytest.mark.gloo
BAD_STEP = 2
CLIP = {"gradient_clip_val": 0.5}
BY_VALUE = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
Even = partial(Ranked, even=True)
OVERFLOWS = partial(Even, bad=(BAD_STEP,), schedule=True)


class Frozen(Ranked):
    def __init__(self) -> None:
        super().__init__(optimizer="groups", even=True)
        self.net[0].requires_grad_(False)
        self.net[1].bias.requires_grad_(False)


class ClipsItself(Ranked):
    """By torch's function, whose norm of the shards is this rank's alone."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


def _both(mode: str, module: Any = Even, options: Any = (), **strategy: Any) -> Both:
    return Both(mode, module, dict(options), strategy, "fsdp1")


SHARDINGS: dict[str, dict[str, Any]] = {
    "grad op": {"sharding_strategy": "SHARD_GRAD_OP"}, "no shard": {"sharding_strategy": "NO_SHARD"},
    "classes": {"wrap": [nn.Linear]}, "root only": {"wrap": None}, "cpu offload": {"cpu_offload": True},
}  # fmt: skip
#: what is DDP's but for the order of sums
NEAR: dict[str, Both] = {
    **{name: _both("16-mixed", OVERFLOWS, CLIP, **strategy) for name, strategy in SHARDINGS.items()},
    "clips itself": _both("16-mixed", partial(ClipsItself, even=True)),
    "value": _both("bf16-mixed", options=BY_VALUE),
    "accumulate": _both("bf16-mixed", options={"accumulate_grad_batches": 2}),
    "frozen": _both("bf16-mixed", Frozen, CLIP),
    "no part of a parameter": _both("16-mixed", partial(Ranked, bad=(0,))),
}


@pytest.mark.parametrize("case", NEAR)
def test_options_optimizers_and_models_mean_what_they_mean_under_ddp(ranks: Ranks, case: str) -> None:
    one, other = ranks.run(NEAR[case])
    for result in (one, other):
        assert same_runs(result["sharded"], result["ddp"], of_training(NEAR[case].mode, RATE))
        by_norm = NEAR[case].options.get("gradient_clip_val") == 0.5
        assert any(map(math.isfinite, result["sharded"]["norms"])) == by_norm
    assert same_weights(one["sharded"]["weights"], other["sharded"]["weights"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mixed_precision": MixedPrecision(reduce_dtype=torch.float16)}, "mixed_precision="),
        ({"activation_checkpointing_policy": {nn.Linear}}, "which the plan or the Trainer decides"),
        ({"auto_wrap_policy": {nn.Linear}}, "wrap=[TheBlock]"),
        ({"use_orig_params": False}, "use_orig_params=False"),
        ({"state_dict_type": "sharded"}, "state_dict_type='sharded'"),
        ({"ignored_states": []}, "ignored_states= with FSDP1. Use strategy='mp_fsdp2'"),
        ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": (1, 2)}, "mp_hsdp"),
        ({"mixed_precision": MixedPrecision(), "activation_checkpointing": nn.Linear}, "2 errors"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_contradicts_a_plan_is_refused_at_construction(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as error:
        make_strategy("fsdp1", MixedPrecisionPlan("bf16-mixed"), **options)
    assert said.lower() in str(error.value).lower()


class Wrapped(Ranked):
    def configure_model(self) -> None:
        if not isinstance(self.net[0], FullyShardedDataParallel):
            self.net[0] = FullyShardedDataParallel(self.net[0], device_id=torch.device("cpu"))


class Holds(Ranked):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.ones(3, **options), requires_grad=False)


class Finetuned(Ranked):
    @property
    def backbone(self) -> nn.Module:
        return self.net[0]


class Writes(Ranked):
    """Calls ``write(self)`` in ``training_step``, or in another hook."""

    def __init__(self, write: Callable[[Any], None], hook: str = "on_train_batch_end") -> None:
        super().__init__(optimizer="momentum")
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.write, self.hook = write, hook

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.write_in("training_step")
        return super().training_step(batch, batch_idx) + 0.0 * self.teacher(batch[0]).float().sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.write_in("validation_step")
        super().validation_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.write_in("on_train_batch_end")

    def write_in(self, hook: str) -> None:
        if hook == self.hook:
            self.write(self)


def clip(module: Any) -> None:
    for parameter in module.net.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def assign_clipped(module: Any) -> None:
    for parameter in module.net.parameters():
        parameter.data = parameter.data.clamp(-0.1, 0.1)


def follow(module: Any) -> None:
    for slow, fast in zip(module.teacher.parameters(), module.net.parameters(), strict=True):
        slow.data = slow.data * 0.5 + fast.data * 0.25


def set_whole(module: Any) -> None:
    count = sum(parameter.numel() for parameter in module.net.parameters())
    nn.utils.vector_to_parameters(torch.linspace(-0.1, 0.1, count), module.net.parameters())


def look(module: Any) -> None:
    with torch.no_grad():
        module.net(torch.ones(2, FEATURES))


def _fitted(module: Any, options: Any = (), mode: str = "bf16-mixed", pins: Any = None, **strategy: Any) -> Any:
    return fit(module, plugins=[plan_for(mode, pins=pins)], **dict(options), **fsdp1(**strategy))


def _validated(module: Any, **strategy: Any) -> None:
    trainer(plugins=[plan_for("bf16-mixed")], **fsdp1(**strategy)).validate(module, batches(), verbose=False)


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
    "another fit": _twice,
    # weights of the root are whole in a step, and the root is all where wrap= is None
    "clip in a step": lambda: _fitted(Writes(clip, "training_step"), wrap=None),
    "assign in a step": lambda: _fitted(Writes(assign_clipped, "training_step"), wrap=None),
    "follow in a step": lambda: _fitted(Writes(follow, "training_step"), wrap=None),
    "grad op": lambda: _fitted(Writes(clip, "training_step"), wrap=None, sharding_strategy="SHARD_GRAD_OP"),
    "offload": lambda: _fitted(Writes(clip, "training_step"), wrap=None, cpu_offload=True),
    "clip in validation": lambda: _validated(Writes(clip, "validation_step"), wrap=None),
    "vector": lambda: _fitted(Writes(set_whole)),
    "forward in a hook": lambda: _fitted(Writes(look)),
}
DROPPED = ("written to in a step, with FSDP1", "mp_fsdp2")
SAID = {
    "pins": ("pins with FSDP1", "mp_fsdp2"),
    "finetuning": ("BackboneFinetuning with FSDP1's flat parameters",),
    "wrapped": ("wrapped in FullyShardedDataParallel already", "configure_model"),
    "integer": ("'more' in int8", "mp_fsdp2"),
    "meta": ("'more' on the meta device", "mp_fsdp2"),
    "manual": ("automatic_optimization=False",),
    "another fit": ("of a module that FSDP1 wrapped", "Make a new module"),
    **dict.fromkeys(("clip in a step", "assign in a step", "grad op", "offload", "clip in validation"), DROPPED),
    "follow in a step": ("'teacher.", *DROPPED),
    "vector": ("'net.0.weight' in vector_to_parameters", "mp_fsdp2"),
    "forward in a hook": ("a forward of LayerNorm outside of a step", "'net.1.", "mp_fsdp2"),
}


@pytest.mark.parametrize("which", WAYS)
def test_what_cannot_run_is_refused(ranks: Ranks, which: str) -> None:
    for message in ranks.call(refused_way, __name__, which):
        assert all(text.lower() in message.lower() for text in SAID[which]), message


def explained(write: Callable[[Any], None], hook: str) -> str:
    """What torch's error says, with what is added to it."""
    try:
        _fitted(Writes(write, hook))
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()
    return "no error"


def follow_in_place(module: Any) -> None:
    with torch.no_grad():
        for slow, fast in zip(module.teacher.parameters(), module.net.parameters(), strict=True):
            slow.mul_(0.5).add_(fast, alpha=0.25)


@pytest.mark.parametrize("write", [follow, follow_in_place])
def test_torchs_error_about_pieces_of_weights_says_which_strategy_has_them_whole(ranks: Ranks, write: Any) -> None:
    for said in ranks.call(explained, write, "on_train_batch_end"):
        assert "size of tensor" in said
        assert "FSDP1 holds as flat pieces. Use strategy='mp_fsdp2'" in said


def test_a_hook_that_writes_entry_by_entry_is_as_under_ddp(ranks: Ranks) -> None:
    for write in (clip, assign_clipped):
        for result in ranks.run(_both("bf16-mixed", partial(Writes, write))):
            assert same_runs(result["sharded"], result["ddp"], of_training("bf16-mixed", RATE))
