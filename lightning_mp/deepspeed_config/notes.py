"""What became of every key of a DeepSpeed JSON that a plan was read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from lightning_mp.deepspeed_config import schema as keys
from lightning_mp.errors import Faults


@dataclass(frozen=True, slots=True)
class DeepSpeedNotes:
    """A key (``"fp16.loss_scale"``, ``"optimizer"``) and what became of it, in words; ``print`` shows a line a key."""

    #: what the plan says now, and as what
    taken: dict[str, str]
    #: what the DeepSpeed engine, the Trainer or the model says, and where
    left: dict[str, str]
    #: what neither takes: unknown or removed keys, values that DeepSpeed would refuse; the plan stands without them
    refused: dict[str, str]

    def __str__(self) -> str:
        kinds = (("taken", self.taken), ("left", self.left), ("refused", self.refused))
        return "\n".join(f"{kind:<8}{key}: {reason}" for kind, notes in kinds for key, reason in notes.items())


#: keys that something else than the engine says under Lightning
_ELSEWHERE: Mapping[str, str] = {
    "optimizer": "configure_optimizers() makes it",
    "scheduler": "configure_optimizers() makes it",
    "gradient_clipping": "Trainer(gradient_clip_val=...)",
    "gradient_accumulation_steps": "Trainer(accumulate_grad_batches=...)",
    "train_micro_batch_size_per_gpu": "the dataloader's batch_size",
    "train_batch_size": "the dataloader's batch_size x accumulate_grad_batches x devices",
    "activation_checkpointing": "checkpointing= says which modules recompute; the block tunes DeepSpeed's own function",
    "comms_config": "no key of DeepSpeed's, nothing reads it",
}
_ENGINE = "the engine's own: give the JSON to the strategy as config="


def left_to_others(key: str, value: Any, notes: DeepSpeedNotes) -> None:
    """Note a top-level key that the plan does not take, and what is wrong below it."""
    if key.startswith("_"):
        notes.left[key] = "a comment"
    elif _wrong("", key, value, notes):
        return
    elif key == "zero_optimization" and isinstance(value, Mapping):
        notes.left[key] = _strategy(cast("Mapping[str, Any]", value))
    else:
        plain = isinstance(value, (int, float, str)) and not isinstance(value, bool)
        notes.left[key] = _ELSEWHERE.get(key, _ENGINE).replace(
            "...", repr(value) if plain and value != "auto" else "..."
        )


def _wrong(where: str, key: str, value: Any, notes: DeepSpeedNotes) -> bool:
    """Note what DeepSpeed or the strategy would refuse of an entry; whether it is the entry as a whole."""
    path = f"{where}.{key}" if where else key
    faults = Faults()
    said = value is not None and not (isinstance(value, str) and value == "auto")
    if said or key not in (keys.BLOCKS[where] if where else keys.TOP):
        keys.known(where, {key: {} if isinstance(value, Mapping) else value}, faults)
    if faults.found:
        notes.refused[path] = f"{faults.found[0].given}: {faults.found[0].fix}"
    elif path in keys.BLOCKS and isinstance(value, Mapping):
        for name, item in cast("Mapping[Any, Any]", value).items():
            if not str(name).startswith("_"):
                _wrong(path, str(name), item, notes)
    return bool(faults.found)


def _strategy(zero: Mapping[str, Any]) -> str:
    stage = zero.get("stage", 0)
    if stage in (1, 2, 3) and not isinstance(stage, bool):
        return f"make_strategy('deepspeed_zero{stage:.0f}', plan, config=...) takes the block"
    given = "stage 0 shards nothing" if stage == 0 else f"stage={stage!r}"
    return f"{given}: use strategy='mp_ddp', or choose a stage, strategy='mp_deepspeed_zero1' to 3"
