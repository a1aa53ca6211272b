"""DeepSpeed's JSON: its keys, what a strategy makes of one, and a plan read from one and written to one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from typing_extensions import Self

    from lightning_mp.deepspeed_config.read import DeepSpeedNotes
    from lightning_mp.policy import PrecisionPolicy


class DeepSpeedJson:
    """The part of a plan that reads and writes DeepSpeed's JSON."""

    policy: PrecisionPolicy
    #: what became of every key of the JSON that the plan was read from; ``None`` where it was not
    deepspeed_notes: DeepSpeedNotes | None = None

    @classmethod
    def from_deepspeed(cls, config: Mapping[str, Any] | str | PathLike[str]) -> Self:
        """A plan from a DeepSpeed JSON: a mapping, an OmegaConf ``DictConfig`` or the path of a file.

        ``fp16`` is ``"16-mixed"``, ``bf16`` ``"bf16-mixed"``, neither ``"32-true"``; ``"auto"`` that nothing decides is
        ``"auto"``. ``deepspeed_notes`` says of every key whether the plan took it (``docs/how-to/deepspeed.md``).

        Raises:
            PlanError: no JSON, or one that asks for formats a plan cannot carry out; every fault is named at once.
        """
        from lightning_mp.deepspeed_config.read import read_policy

        policy, notes = read_policy(config)
        plan: Self = cast("Any", cls).from_policy(policy)
        plan.deepspeed_notes = notes
        return plan

    def to_deepspeed(
        self,
        path: str | PathLike[str] | None = None,
        *,
        stage: int = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        train_micro_batch_size_per_gpu: int = 1,
        gradient_accumulation_steps: int = 1,
        gradient_clipping: float = 0.0,
    ) -> dict[str, Any]:
        """The JSON with which DeepSpeed alone does what the plan says; it is written to ``path`` too, if that is given.

        What a DeepSpeed JSON has no key for (pins, TF32, checkpointing, …) stands as lines under ``_comment``.
        Batch, accumulation and clipping (a norm; 0 is none) go into it as given: DeepSpeed has no Trainer to ask.

        Raises:
            PlanError: what DeepSpeed would carry out with other numbers (growth and backoff factors, true modes, …);
                every fault is named at once, and no file is written.
        """
        from lightning_mp.deepspeed_config.merge import write_policy

        trainer = {
            "train_micro_batch_size_per_gpu": train_micro_batch_size_per_gpu,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "gradient_clipping": gradient_clipping,
        }
        offload = {"offload_optimizer": offload_optimizer, "offload_parameters": offload_parameters}
        config = write_policy(self.policy, trainer, stage=stage, **offload)
        if path is not None:
            Path(path).write_text(json.dumps(config, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        return config
