"""What the module's ``pipeline_batch`` and ``pipeline_loss`` give, and why a batch cannot go through the stages."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mp.compat.lightning import LightningModule
from lightning_mp.errors import Fault, PlanError
from lightning_mp.strategies.pipeline.stages import leaves

LOGS = Fault(
    "self.log in pipeline_loss, which is called on the last stage alone",
    "a pure pipeline_loss: what one stage logs would wait for the others",
    "log in a hook or a callback; train_loss, val_loss and test_loss are logged on every rank",
)


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
        #: of the loss of this batch, which only the last stage sees
        self._fault: Fault | None = None
        #: batches of training, and others, of which all stages have learnt what is wrong
        self._looked: set[bool] = set()

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
        if not inputs or not all(isinstance(one, Tensor) and one.ndim for one in inputs):
            _refuse(
                "pipeline_batch with inputs that are no tensors with a dimension of rows",
                "a tensor, or a tuple of tensors, rows first",
                "make tensors of them in pipeline_batch",
            )
        self._check_rows([*inputs, *leaves(target)], training=training)
        if training:
            self._check_shapes(inputs)
        self._check_alike([*inputs, *leaves(target)], self._module.trainer.current_epoch if training else -1)
        return inputs, target

    def _check_rows(self, tensors: list[Tensor], *, training: bool) -> None:
        rows = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
        if len(rows) > 1:
            _refuse(
                f"pipeline_batch with tensors of {' and '.join(map(str, sorted(rows)))} rows",
                "inputs and target of as many rows, which are cut into micro-batches together",
                "give every tensor the rows of the batch, or keep what has none in the module",
            )
        number = rows.pop()
        if training and number % self._microbatches:
            _refuse(*rows_that_do_not_divide(number, self._microbatches))

    def _check_shapes(self, inputs: tuple[Tensor, ...]) -> None:
        shapes = [tensor.shape for tensor in inputs]
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes:
            _refuse(
                f"a batch of shape {[*map(tuple, shapes)]} after batches of {[*map(tuple, self._shapes)]}",
                "training batches of one shape: the stages receive into buffers of it",
                "pad to one length, and use DataLoader(drop_last=True)",
            )

    def _check_alike(self, tensors: list[Tensor], epoch: int) -> None:
        """Compare batch 0, 1, 2, 4, 8, … of an epoch, with a device sync; all ranks of a replica refuse together.

        The first may be alike and the second not: a hook may draw on one stage alone from the generator that a data set
        draws from as it goes.
        """
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
                "the same batch on every stage of a replica",
                "call seed_everything() before data is made, draw what is random in it from a torch.Generator of its "
                "own, and give a sampler of your own num_replicas and rank of "
                "trainer.strategy.distributed_sampler_kwargs",
            )

    def loss(self, output: Any, target: Any) -> Tensor:
        """The module's ``pipeline_loss`` of a micro-batch; where it is none, one that the schedule can go on with."""
        given: Any = self._module
        with self._context():
            loss = given.pipeline_loss(output, target)
        trains = any(leaf.requires_grad for leaf in leaves(output))
        if isinstance(loss, Tensor) and not loss.ndim and (loss.requires_grad or not trains):
            return loss
        what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss)
        what = what if not isinstance(loss, Tensor) or loss.ndim else "a tensor without a gradient"
        fix = "return the mean over the rows of the micro-batch, computed from the output without detach() or item()"
        self._fault = Fault(f"pipeline_loss, which returned {what}", "a scalar tensor with a gradient", fix)
        return any_loss(output)

    @contextmanager
    def nothing_logged(self) -> Generator[None, None, None]:
        """Within it ``self.log`` is a fault."""
        self._module.__dict__["log"] = self._logs
        try:
            yield
        finally:
            del self._module.__dict__["log"]

    def _logs(self, *args: Any, **kwargs: Any) -> None:
        self._fault = LOGS

    def check(self, fault: Fault | None = None, *, training: bool) -> None:
        """After a schedule, which every stage has come through; after the first all of them learn what one has seen.

        Raises:
            PlanError: ``fault``, or what was wrong with the loss of a batch.
        """
        fault, self._fault = fault or self._fault, None
        if training not in self._looked:
            self._looked.add(training)
            every: list[Fault | None] = [None] * self._group.size()
            dist.all_gather_object(every, fault, group=self._group)
            fault = next(filter(None, every), None)
        if fault is not None:
            raise PlanError([fault], "strategy")


def any_loss(output: Any) -> Tensor:
    """A loss of every number of a stage's output, for its shapes alone."""
    floating = [leaf for leaf in leaves(output) if leaf.is_floating_point()]
    return torch.stack([leaf.float().square().sum() for leaf in floating]).sum()


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
