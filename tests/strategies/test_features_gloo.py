"""What a run may do beside training: on two processes it ends as on one device on the same batches, or is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.comparing import eps, same
from support.features import FEATURE, OWN_WINDOWS, ran
from support.ranks import Ranks

pytestmark = pytest.mark.gloo
#: of a sum in another order, and of what steps make of it
WITHIN = 1e-4
IN_HOOKS = "before the step, with ZeRO, which has moved the gradients"
#: a warning, which ends the run here
READS = "reads parameter.grad, which is None here"
NO_GRADIENT = "without a gradient in a backward pass, with ZeRO"
SHARDED = "with sharded weights"
ONE_PROCESS = {
    "batch_size_scaler": "currently not supported with distributed strategies",
    "training_step_returns_none": "returning None in distributed training is not supported",
}
FINETUNING = "Finetuning callback does not support running with the DeepSpeed strategy"
EMA = ["ema", "ema_resumed"]
CHANGES = "frozen or unfrozen in a run with ZeRO"
WRITTEN = "written to between steps with ZeRO-3"
#: as it is stored, and as it is gathered in half precision
ELSEWHERE = "used in the step outside of the unit that holds it", "something reads it outside a matmul"
OTHER_UNITS = "with sharded weights, which all ranks gather"
OTHER_GRADIENTS = "on some ranks only, or in another order, with ZeRO"
#: of what ranks do differently, what is seen by the gradients alone
APART = ["a_unit_is_used_on_one_rank", "ranks_run_units_in_opposite_orders"]
ONE_RANK_MIDWAY = ["one_rank_freezes_in_the_midst_of_a_window", "one_rank_unfreezes_in_the_midst_of_a_window"]
MIDWAY = ["freezes_in_the_midst_of_a_window", "unfreezes_in_the_midst_of_a_window"]
HEADS_APART = ["a_head_a_rank", "a_head_a_rank_of_other_sizes"]
ZERO = {
    **ONE_PROCESS,
    "pruning": "ModelPruning with ZeRO",
    "swa": "SWA does not currently support sharded models",
    **dict.fromkeys((*EMA, "lr_finder"), "with ZeRO, whose weights and schedule"),
    **dict.fromkeys([name for name in FEATURE if name.startswith("two_optimizers")], "only supports single optimizer"),
    "accumulates_on_a_schedule": "does not support `accumulate_grad_batches` changing",
    "clips_in_a_hook": IN_HOOKS,
    "changes_before_the_step": READS,
    "poisons_before_the_step": READS,
    "manual_poisons_after_backward": READS,
    "logs_grad_norm": READS,
    "clips_by_value": "gradient_clip_algorithm='value' with ZeRO",
    **dict.fromkeys(["a_layer_is_never_used", "heads_by_turns"], NO_GRADIENT),
    **dict.fromkeys(["freezes_by_hand", "unfreezes_by_hand", *MIDWAY], CHANGES),
    "backbone_finetuning": FINETUNING,
    "optimizer_step_calls_the_raw_optimizer": "called on the optimizer inside of Lightning's",
    "manual_bare_backward": "loss.backward() with ZeRO",
    "manual_accumulation": "two manual_backward() before a step with ZeRO",
}
ON_ONE_RANK = [*APART, *HEADS_APART, *ONE_RANK_MIDWAY, "a_layer_is_used_on_one_rank"]
ZERO_12 = {**ZERO, **dict.fromkeys(ON_ONE_RANK, OTHER_GRADIENTS), ONE_RANK_MIDWAY[1]: CHANGES}
#: of stages that step a parameter with what an earlier pass, or window, left
LEFT_OVER = {"heads_by_turns_in_a_window": NO_GRADIENT}
FSDP2 = {
    **ONE_PROCESS,
    **dict.fromkeys([*EMA, "swa", "pruning", "lr_finder"], SHARDED),
    "all_weights_in_the_loss": ELSEWHERE,
    **dict.fromkeys(APART, OTHER_UNITS),
}
#: strategy → feature → what the refusal says; what is not named here is the same
REFUSED: dict[str, dict[str, Any]] = {
    "ddp": {
        **ONE_PROCESS,
        **dict.fromkeys([*MIDWAY, *ONE_RANK_MIDWAY], "within an accumulation window, with DDP"),
        "manual_bare_backward": "loss.backward() with DDP",
    },
    "fsdp2": FSDP2,
    "hsdp": FSDP2,
    "fsdp2_offload": FSDP2,
    "deepspeed_zero1": {**ZERO_12, **LEFT_OVER},
    "deepspeed_zero2": ZERO_12,
    "deepspeed_zero2_offload": {**ZERO_12, **LEFT_OVER},
    "deepspeed_zero3": {
        **ZERO, **LEFT_OVER, **dict.fromkeys(ON_ONE_RANK, OTHER_UNITS), "all_weights_in_the_loss": ELSEWHERE,
        "clamps_weights_after_the_step": WRITTEN,
        "saved_after_validation": "trainer.save_checkpoint() after trainer.validate()",
    },
    "deepspeed_zero2_half": ZERO_12,
}  # fmt: skip
MODES = ("32-true", "bf16-mixed", "16-mixed")
WINDOWS = (1, 2)
VARIANTS = [(mode, window) for window in WINDOWS for mode in MODES]
#: within a window ZeRO-3 has taken weights away again: a rank waits for another's gather, as with DeepSpeed alone
WAITS = ("deepspeed_zero3", 2, [*HEADS_APART, *ONE_RANK_MIDWAY, "a_layer_is_used_on_one_rank"])


def cells() -> Iterator[Any]:
    for place, column in enumerate(REFUSED):
        for turn, name in enumerate(FEATURE):
            variants = [one for one in VARIANTS if one[1] == 1 or name not in OWN_WINDOWS]
            variants = [one for one in variants if one[0] != "32-true" or not column.endswith("_half")]
            variants = [one for one in variants if (column, one[1]) != WAITS[:2] or name not in WAITS[2]]
            for number, (mode, window) in enumerate(variants):
                now = (place + turn) % 7 == 0 and number == (turn // 3 + place) % len(variants)
                marks = [] if now else [pytest.mark.slow, pytest.mark.whole]
                yield pytest.param(column, name, mode, window, marks=marks)


#: of FSDP1, which is kept for those who have it: what it would do otherwise than one device
FSDP1: dict[str, str | None] = {
    "batch_norm_evaluated": None,
    **dict.fromkeys(MIDWAY, "within an accumulation window, with FSDP1"),
}


def fsdp1() -> Iterator[Any]:
    for name in FSDP1:
        yield pytest.param("fsdp1", name, "32-true", 1)


@pytest.fixture(scope="module")
def one_device() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def alone_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where that process writes: one folder, so that a case is the same case for every strategy."""
    return tmp_path_factory.mktemp("alone")


@pytest.mark.parametrize(("strategy", "name", "mode", "window"), [*cells(), *fsdp1()])
def test_it_is_the_same_as_on_one_device_or_refused(
    strategy: str, name: str, mode: str, window: int, ranks: Ranks, one_device: Ranks, alone_in: Path, tmp_path: Path
) -> None:
    (alone,) = one_device.call(ran, name, "single", str(alone_in / f"{name}-{mode}-{window}"), mode, window)
    refusal = REFUSED.get(strategy, FSDP1).get(name, alone.get("refused"))
    for each in ranks.call(ran, name, strategy, str(tmp_path), mode, window):
        assert "failed" not in each, each["failed"]
        if refusal is None:
            assert same(alone, each, max(WITHIN, eps(mode))), (alone, each)
        else:
            told, said = (refusal,) if isinstance(refusal, str) else refusal, each.get("refused", "it ran").lower()
            assert any(words.lower() in said for words in told), said
