"""What the module's ``pipeline_batch`` and ``pipeline_loss`` give, and why a batch cannot go through the stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mp.compat.lightning import LightningModule
from lightning_mp.errors import Fault, PlanError
from lightning_mp.numerics.nested import tensors_in


class Batches:
    """Asks the module for what goes in and what comes out.

    Args:
        module: the user's.
        microbatches: pieces of a training batch.
        group: the stages of this replica, which must get the same batch.
        context: around the loss, as around the stages: the plan's.
    """

    def __init__(
        self, module: LightningModule, microbatches: int, group: dist.ProcessGroup, context: Callable[[], Any]
    ) -> None:
        self._module, self._microbatches, self._group, self._context = module, microbatches, group, context
        self._shapes: list[torch.Size] | None = None
        #: the epoch that batches are counted in, and how many came
        self._epoch: int | None = None
        self._drawn = 0

    def of(self, batch: Any, *, training: bool) -> tuple[tuple[Tensor, ...], Any]:
        """Inputs and target of a batch.

        Raises:
            PlanError: they are no tensors with rows, the rows do not divide, or the stages got different batches.
        """
        given: Any = self._module
        pair = given.pipeline_batch(batch)
        if not isinstance(pair, tuple) or len(pair) != 2:  # pyright: ignore[reportUnknownArgumentType]
            _refuse(f"pipeline_batch, which returned {type(pair).__name__}", "(inputs, target)", "return the two")
        inputs, target = pair  # pyright: ignore[reportUnknownVariableType]
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        tensors: list[Tensor] = [*tensors_in(inputs), *tensors_in(target)]
        rows = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
        if len(rows) != 1 or not all(isinstance(one, Tensor) for one in inputs):
            _refuse(
                f"pipeline_batch with tensors of {' and '.join(map(str, sorted(rows)))} rows",
                "",
                "give every tensor the rows of the batch, or keep what has none in the module",
            )
        if training:
            self._check_shapes(rows.pop(), [tensor.shape for tensor in cast("tuple[Tensor, ...]", inputs)])
        self._check_alike(tensors, self._module.trainer.current_epoch if training else -1)
        return inputs, target

    def _check_shapes(self, rows: int, shapes: list[torch.Size]) -> None:
        if rows % self._microbatches:
            _refuse(*rows_that_do_not_divide(rows, self._microbatches))
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            _refuse(
                f"a batch of shape {[*map(tuple, shapes)]} after batches of {[*map(tuple, self._shapes)]}",
                "",
                "pad to one length, and use DataLoader(drop_last=True)",
            )

    def _check_alike(self, tensors: list[Tensor], epoch: int) -> None:
        """Compare batch 0, 1, 2, 4, 8, … of an epoch, with a device sync; all ranks of a replica refuse together."""
        if self._epoch != epoch:
            self._epoch, self._drawn = epoch, 0
        number, self._drawn = self._drawn, self._drawn + 1
        if number & (number - 1):
            return
        sums = torch.stack([_fingerprint(tensor) for tensor in tensors]).flatten()
        extremes = torch.cat([sums, -sums])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._group)
        if not torch.equal(extremes[: len(sums)], -extremes[len(sums) :]):
            _refuse(
                "other batches on one stage than on another",
                "",
                "call seed_everything() before data is made, and give a sampler of your own num_replicas and rank of "
                "trainer.strategy.distributed_sampler_kwargs",
            )

    def loss(self, output: Any, target: Any) -> Tensor:
        """The module's ``pipeline_loss`` of a micro-batch.

        Raises:
            PlanError: it is no scalar with a gradient.
        """
        given: Any = self._module
        with self._context():
            loss = given.pipeline_loss(output, target)
        trains = any(one.requires_grad for one in tensors_in(output))
        if not isinstance(loss, Tensor) or loss.ndim or (trains and not loss.requires_grad):
            what = tuple(loss.shape) if isinstance(loss, Tensor) and loss.ndim else type(loss).__name__
            _refuse(
                f"pipeline_loss, which returned {what}",
                "",
                "return the mean over the rows of the micro-batch, computed from the output without detach() or item()",
            )
        return loss


def any_loss(output: Any) -> Tensor:
    """A loss of every number of a stage's output, for its shapes alone."""
    floating = [one for one in tensors_in(output) if one.is_floating_point()]
    return torch.stack([one.float().square().sum() for one in floating]).sum()


def split(value: Any, number: int) -> list[Any]:
    """``value`` cut into ``number`` equal pieces along the first dimension of every tensor in it."""
    if isinstance(value, Tensor):
        return list(value.split(len(value) // number))
    if isinstance(value, dict):
        members = cast("dict[Any, Any]", value)
        pieces = {key: split(member, number) for key, member in members.items()}
        return [{key: pieces[key][place] for key in members} for place in range(number)]
    if isinstance(value, (list, tuple)):
        pieces = [split(member, number) for member in cast("list[Any]", value)]
        return [type(value)(piece[place] for piece in pieces) for place in range(number)]  # pyright: ignore
    return [value] * number


def rows_that_do_not_divide(rows: int, microbatches: int) -> tuple[str, str, str]:
    """What to say of a batch of so many rows."""
    return (
        f"a batch of {rows} rows with microbatches={microbatches}",
        "batches that the micro-batches divide",
        f"use a batch size that is a multiple of {microbatches}, with drop_last=True, or other microbatches=",
    )


def _fingerprint(tensor: Tensor) -> Tensor:
    """Two sums of a tensor that differ where two batches do."""
    numbers = tensor.detach().flatten().to(torch.float64 if tensor.device.type != "mps" else torch.float32)
    weights = torch.arange(1, len(numbers) + 1, device=numbers.device, dtype=numbers.dtype)
    return torch.nan_to_num(torch.stack([numbers.sum(), (numbers * weights).sum()]))


def _refuse(given: str, allowed: str, fix: str) -> NoReturn:
    raise PlanError([Fault(given, allowed, fix)], "strategy")
