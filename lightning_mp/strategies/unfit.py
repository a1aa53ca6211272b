"""What would fail in a run whose weights are not whole, or not those that are stepped: callbacks, kinds of weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import nn

from lightning_mp.compat.lightning import TrainerFn, WeightAveraging, callbacks, trainer_of
from lightning_mp.errors import Faults

AVERAGES: tuple[Any, ...] = (WeightAveraging, callbacks.StochasticWeightAveraging)
PRUNING: tuple[Any, ...] = (callbacks.ModelPruning,)
FINETUNING: tuple[Any, ...] = (callbacks.BaseFinetuning,)
LR_FINDER: tuple[Any, ...] = (callbacks.LearningRateFinder,)


def refuse(module: Any, faults: Faults, kinds: Iterable[Any], why: str) -> None:
    """Note each callback of a fit that is one of ``kinds``, and ``why`` it cannot do its work."""
    trainer = trainer_of(module)
    if trainer is None or trainer.state.fn != TrainerFn.FITTING:
        return
    for callback in cast("Any", trainer).callbacks:
        if isinstance(callback, tuple(kinds)):
            name = type(callback).__name__
            faults.add(f"{name} with {why}", f"runs without {name}", f"remove {name}, or use strategy='mp_ddp'")


def refuse_with_shards(module: Any, faults: Faults) -> None:
    """Note what shards cannot serve; the learning-rate finder waits for ever where it restores what it saved."""
    refuse(module, faults, (*AVERAGES, *PRUNING, *LR_FINDER), "sharded weights")


def refuse_with_stages(module: Any, faults: Faults) -> None:
    """Note what stages cannot serve either: BaseFinetuning finds what an optimizer has by comparing numbers."""
    refuse_with_shards(module, faults)
    refuse(module, faults, FINETUNING, "pipeline stages, of whose parameters most are on other ranks")


def refuse_with_zero(module: Any, stage: int, faults: Faults) -> None:
    """Note what ZeRO cannot serve; stages 1 and 2 have whole weights, but their checkpoints hold no averages."""
    refuse(module, faults, LR_FINDER, "ZeRO, whose optimizer takes no other schedule in a run")
    refuse(module, faults, PRUNING, "ZeRO, which steps copies of the weights that it prunes")
    refuse_scalars(module, (), "ZeRO", faults)
    if stage == 3:
        refuse_max_norm(module, faults)
        refuse(module, faults, AVERAGES, "sharded weights")
    elif (trainer := trainer_of(module)) is not None and trainer.checkpoint_callbacks:
        refuse(module, faults, AVERAGES, "ZeRO's checkpoints, which do not hold the average")


def refuse_weights(module: nn.Module, ignored: Iterable[Any], faults: Faults) -> None:
    """Note weights of which ranks cannot hold shards; the ``ignored`` ones are not sharded."""
    refuse_scalars(module, ignored, "sharded weights", faults)
    refuse_max_norm(module, faults)


def refuse_scalars(module: nn.Module, ignored: Iterable[Any], why: str, faults: Faults) -> None:
    """Note parameters without a dimension, which cannot be cut into pieces."""
    left_out = set(map(id, ignored))
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0 and id(parameter) not in left_out:
            faults.add(
                f"{name!r}, a parameter without a dimension, with {why}",
                "make it nn.Parameter(value.view(1)) before the run, which computes the same, or use strategy='mp_ddp'",
            )


def refuse_max_norm(module: nn.Module, faults: Faults) -> None:
    """Note embeddings whose forward writes to their weights."""
    for name, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            faults.add(
                f"{name!r} with max_norm={part.max_norm:g}, with sharded weights: its forward scales rows of the "
                "gathered copy, which the shards never see",
                "leave max_norm out and limit the rows after each step, or use strategy='mp_ddp'",
            )
