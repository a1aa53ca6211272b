"""What would fail in a run whose weights are not whole, or not those that are stepped: callbacks, kinds of weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import nn

from lightning_mp.compat.lightning import TrainerFn, WeightAveraging, callbacks, trainer_of
from lightning_mp.errors import Faults

_AVERAGES: tuple[Any, ...] = (WeightAveraging, callbacks.StochasticWeightAveraging)
_SHARDS: tuple[Any, ...] = (*_AVERAGES, callbacks.ModelPruning, callbacks.LearningRateFinder)
#: by what holds the weights, the callbacks that cannot do their work there, and why
_UNFIT: dict[str, tuple[tuple[tuple[Any, ...], str], ...]] = {
    # the learning-rate finder waits for ever where it restores what it saved
    "shards": ((_SHARDS, "sharded weights"),),
    # BaseFinetuning finds what an optimizer has by comparing numbers
    "stages": ((_SHARDS, "sharded weights"), ((callbacks.BaseFinetuning,), "pipeline stages, most on other ranks")),
    "flat": (((*_AVERAGES, callbacks.ModelPruning, callbacks.BaseFinetuning), "FSDP1's flat parameters"),),
    "ZeRO": (
        (_AVERAGES, "ZeRO, whose checkpoints hold no average"),
        ((callbacks.LearningRateFinder,), "ZeRO, whose optimizer takes no other schedule in a run"),
        ((callbacks.ModelPruning,), "ZeRO, which steps copies of the weights that it prunes"),
    ),
}


def refuse(module: Any, kind: str, faults: Faults) -> None:
    """Note each callback of a fit that cannot work where weights are held as ``kind`` says."""
    trainer = trainer_of(module)
    if trainer is None or trainer.state.fn != TrainerFn.FITTING:
        return
    for kinds, why in _UNFIT[kind]:
        for callback in cast("Any", trainer).callbacks:
            if isinstance(callback, kinds):
                name = type(callback).__name__
                faults.add(f"{name} with {why}", f"runs without {name}", f"remove {name}, or use strategy='mp_ddp'")


def refuse_weights(
    module: nn.Module,
    faults: Faults,
    ignored: Iterable[Any] = (),
    *,
    why: str = "sharded weights",
    whole: bool = False,
) -> None:
    """Note weights of which ranks cannot hold shards, and embeddings whose forward writes to weights not ``whole``.

    The ``ignored`` ones are not sharded.
    """
    left_out = set(map(id, ignored))
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0 and id(parameter) not in left_out:
            faults.add(
                f"{name!r}, a parameter without a dimension, with {why}",
                "make it nn.Parameter(value.view(1)) before the run, which computes the same, or use strategy='mp_ddp'",
            )
    for name, part in () if whole else module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            faults.add(
                f"{name!r} with max_norm={part.max_norm:g}, with sharded weights: its forward scales rows of the "
                "gathered copy, which the shards never see",
                "leave max_norm out and limit the rows after each step, or use strategy='mp_ddp'",
            )
