"""The strategy of pipeline parallelism for a LightningModule that defines its stages.

Some transformers models, such as Llama and GPT-2, need no definition.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial, partialmethod
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils.data import RandomSampler

from lightning_mp.checkpoints.formats import by_parameter
from lightning_mp.compat.lightning import (
    LightningModule,
    ModelParallelStrategy,
    Trainer,
    TrainerFn,
    accumulates,
    default_pg_timeout,
    is_compiled,
    is_overridden,
    keep_sampler,
    layer_sync_of,
    optimizers_to_device,
    rank_zero_info,
    set_mesh,
    trainer_of,
    validates,
)
from lightning_mp.compat.torch_sharding import set_timeout
from lightning_mp.errors import Faults
from lightning_mp.fsdp2.units import (
    broadcast_from_first,
    materialize,
    shard,
    share_buffers,
    whole_on_cpu,
)
from lightning_mp.modules.remote import free_remote, is_remote
from lightning_mp.numerics.dtypes import floating_in, map_tensors, tensors_in, to_torch
from lightning_mp.numerics.rng import Stream
from lightning_mp.pipeline.schedules import (
    SCHEDULES,
    SEVERAL,
    PipelineEngine,
    StashedGradients,
    WatchedStage,
    average,
    refused,
)
from lightning_mp.pipeline.stages import Cut, Part, cut, units_of
from lightning_mp.plan.alike import apart
from lightning_mp.plan.engine import StepEngine
from lightning_mp.plan.plan import MixedPrecisionPlan
from lightning_mp.strategies.base import PlanStrategy, plan_of, refuse_callbacks

#: the most schedules that are kept for training, and for evaluation. There is one for each shape of
#: batch, with buffers
_KEPT_SCHEDULES = 4
_MODES = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
#: the steps that Lightning requires, and that this strategy does not call
_STEPS = ("training_step", "validation_step", "test_step")


class PlanPipelineStrategy(PlanStrategy, ModelParallelStrategy):
    """The strategy that runs ``torch.distributed.pipelining`` under a plan.

    Every rank has one stage, or several under the interleaved schedule. A batch passes through in
    micro-batches. The module defines ``pipeline_batch(batch) -> (inputs, target)``, a pure
    ``pipeline_loss(output, target) -> Tensor`` and ``pipeline_stage(index, count) -> nn.Module``.
    ``pipeline_stage`` is not needed for transformers' Llama-like models and GPT-2.

    ``training_step``, ``validation_step`` and ``test_step`` are not called. ``train_loss``,
    ``val_loss`` and ``test_loss`` are logged instead. ``trainer.predict`` is refused. A checkpoint
    is one file with the plain model's names, for any number of stages.

    Args:
        stages: the ranks of a pipeline. By default the number of processes divided by
            ``data_parallel_size``.
        schedule: ``"gpipe"``, ``"1f1b"`` or ``"interleaved_1f1b"``.
        microbatches: the micro-batches of a training batch, by default four times ``stages``.
            Gradients are as if they were accumulated.
        data_parallel_size: the number of pipelines, each with its own data. By default the number
            of processes divided by ``stages``, or 1 without ``stages``.
        shard: shard each stage over its replicas with FSDP2. Otherwise each replica has the full
            stage.
        virtual_stages: the stages on a rank under the interleaved schedule.
        process_group_backend: as in Lightning.
        timeout: as in Lightning.

    Raises:
        PlanError: a value is out of range. Raised at the start of a run: the sizes do not fit the
            number of processes, the module cannot be cut, or it lacks a method.
    """

    plan_engine = PipelineEngine
    own_format = None

    def __init__(
        self,
        *,
        stages: int | None = None,
        schedule: str = "1f1b",
        microbatches: int | None = None,
        data_parallel_size: int | str = "auto",
        shard: bool = False,
        virtual_stages: int = 2,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=False, process_group_backend=process_group_backend, timeout=timeout
        )
        with Faults("make_strategy") as faults:
            if schedule not in SCHEDULES:
                faults.unknown("schedule", schedule, SCHEDULES)
            for name, value, least, fix in (
                ("stages", stages, 2, "use 2 or more, or strategy='mp_ddp'"),
                ("microbatches", microbatches, 1, "use a multiple of the stages"),
                ("data_parallel_size", None if data_parallel_size == "auto" else data_parallel_size, 1, "use 1"),
                ("virtual_stages", virtual_stages, 2, "use 2, or schedule='1f1b'"),
            ):
                if value is not None:
                    faults.whole(name, value, least, fix)
        self._stages, self._schedule, self._microbatches = stages, schedule, microbatches
        self._replicas, self.shard, self._virtual = data_parallel_size, shard, virtual_stages
        #: the module that was cut, its cut, and its stages on this rank by index
        self._cut_from: nn.Module | None = None
        self._cut: Cut | None = None
        self._parts: dict[int, Part] = {}
        #: torch's schedules by the key of ``_run``, and targets and losses of the running one
        self._made: dict[Any, Any] = {}
        self._targets: Sequence[Any] = ()
        self._losses: list[Tensor] = []
        #: the shapes of the training inputs, from the first batch on
        self._shapes: list[torch.Size] | None = None
        #: the epoch whose first batch was compared over stages, and True if that batch was for
        #: training
        self._compared: tuple[int, bool] | None = None

    # ------------------------------------------------------------------ processes

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return the number of replicas, and this rank's index among them."""
        group = self.replica_group
        return {"num_replicas": group.size(), "rank": dist.get_rank(group)}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return ``dataloader``, whose ``RandomSampler`` draws the same numbers on all ranks.

        A ``RandomSampler`` without a generator gets one, in place. Its seed is broadcast, so every
        rank must call it. Other samplers are not changed.
        """
        sampler = getattr(dataloader, "sampler", None)
        if isinstance(sampler, RandomSampler) and sampler.generator is None:
            seed = int(torch.randint(2**62, ()))
            sampler.generator = torch.Generator().manual_seed(self.broadcast(seed))
        return dataloader

    def setup_environment(self) -> None:
        """Start the process group, and create the mesh of stages and replicas.

        Raises:
            PlanError: stages times replicas is not the number of processes, or there is one stage
                only.
        """
        world = self.num_nodes * self.num_processes
        stages, replicas = self._sizes(world)
        if stages * replicas != world or stages < 2:
            given = f"stages={stages} and data_parallel_size={replicas} with {world} processes"
            fix = f"start {max(stages, 2) * replicas} processes, or choose sizes whose product is {world}"
            raise refused(given, fix)
        self._setup_distributed()
        names = ("pipeline", "data_parallel")
        self._device_mesh = init_device_mesh(self.root_device.type, (stages, replicas), mesh_dim_names=names)
        set_timeout(self._device_mesh.get_all_groups(), self._timeout)
        set_mesh(self._user_module, self._device_mesh)
        #: the ranks of this pipeline in the order of stages, and the replicas of this rank's stages
        self.stage_group, self.replica_group = map(self._device_mesh.get_group, names)
        #: True if FSDP2 shards each stage over its replicas
        self._shards_stages = self.shard and replicas > 1
        #: the groups whose ranks have all parameters together
        self.parameter_groups = (*((self.replica_group,) if self._shards_stages else ()), self.stage_group)
        #: the number of all stages, virtual ones included, and the indices of this rank's stages
        self._count = stages * (self._virtual if self._schedule in SEVERAL else 1)
        self._mine = range(dist.get_rank(self.stage_group), self._count, stages)
        #: the number of micro-batches of a training batch
        self._pieces = self._microbatches or 4 * stages

    def degrees(self, world: int) -> tuple[int, int, int]:
        """Return the numbers of replicas, shards of a replica, and stages of ``world`` ranks."""
        stages, replicas = self._sizes(world)
        return (1, replicas, stages) if self.shard else (replicas, 1, stages)

    def _sizes(self, world: int) -> tuple[int, int]:
        """Return the numbers of stages and of replicas. Their product may differ from ``world``."""
        replicas = 1 if self._replicas == "auto" else int(self._replicas)
        stages = self._stages or world // replicas
        return stages, max(world // max(stages, 1), 1) if self._replicas == "auto" else replicas

    # ------------------------------------------------------------------ the model

    def connect(self, model: LightningModule) -> None:
        """Connect ``model`` as Lightning does.

        Steps that it lacks get a placeholder until ``teardown``. Lightning requires these steps,
        and this strategy does not call them.
        """
        super().connect(model)
        trainer = trainer_of(model)
        without_data = trainer is not None and trainer.state.fn == TrainerFn.FITTING and not validates(trainer)
        left_out = "validation_step" if without_data else ""  # Lightning warns if it has no data
        missing = (name for name in _STEPS if name != left_out and not is_overridden(name, model))
        vars(model).update(dict.fromkeys(missing, _never))

    def check_plan(self, engine: StepEngine, module: nn.Module, faults: Faults) -> Cut | None:
        """Return the cut of ``module`` into stages, and add a fault for each reason against it.

        A module that was cut before keeps its cut. ``None`` is returned if a fault prevents the
        cut. Nothing is changed.
        """
        model, known = cast("LightningModule", module), self._cut if self._cut_from is module else None
        refuse_callbacks(model, "pipeline stages", faults)
        name, precision = type(model).__name__, engine.policy.precision
        if precision not in _MODES:
            given = f"precision={precision!r} under pipeline parallelism"
            faults.add(given, allowed=", ".join(_MODES), fix="use 'bf16-mixed'")
        hooks = "move it to on_before_backward or on_after_backward: backward runs for each micro-batch"
        batch = "define pipeline_batch(self, batch), which returns (inputs, target)"
        loss = "define pipeline_loss(self, output, target), which returns a scalar"
        for holds, given, fix in (
            (not model.automatic_optimization, "manual optimization", "leave out automatic_optimization=False"),
            (is_overridden("backward", model, LightningModule), "LightningModule.backward overridden", hooks),
            (layer_sync_of(self), "sync_batchnorm=True", "leave it out: batch norms see a micro-batch"),
            (is_compiled(model), "a compiled LightningModule", "leave out torch.compile"),
            (not getattr(model, "pipeline_batch", None), f"{name} without pipeline_batch", batch),
            (not getattr(model, "pipeline_loss", None), f"{name} without pipeline_loss", loss),
        ):
            if holds:
                faults.add(f"{given} cannot run in pipeline stages", fix=f"{fix}, or use strategy='mp_ddp'")
        if known is None and any(map(is_remote, model.parameters())):
            faults.add(
                f"the other stages of {name} are on the ranks of an earlier run",
                fix="make the module anew and load the checkpoint (ckpt_path=...)",
            )
        if faults.found or known is not None:
            return known
        how = cut(model, self._count, faults)
        if how is not None and not faults.found and self._shards_stages:
            for index in range(self._count):
                units_of(how.make(index, self._count), engine, faults)
        return how

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if self.replica_group.size() == 1:
            keep_sampler(trainer)
        plan, module, fitting = plan_of(self), self._user_module, trainer.state.fn == TrainerFn.FITTING
        how: Cut = plan.apply(module)
        if self._cut_from is not module:
            self._cut_from, self._cut = module, how
            self._keep_stages(module, how, plan)
        self._made, self._shapes, self._compared = {}, None, None
        own = [parameter for part in self._parts.values() for parameter in part.parameters()]
        self._gradients = StashedGradients(own, sharded=self._shards_stages)
        # All processes have the same seed. Each stage needs its own stream of random numbers, or
        # dropout masks of stages would be equal.
        self._stream = Stream(dist.get_rank(self.stage_group), self.root_device)
        self.barrier()
        if fitting:
            rank_zero_info(
                f"{type(module).__name__} is trained in {self._count} pipeline stages: pipeline_batch and "
                "pipeline_loss are called, training_step and validation_step are not."
            )
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            optimizers_to_device(self.optimizers, self.root_device)

    def _keep_stages(self, model: LightningModule, how: Cut, plan: MixedPrecisionPlan) -> None:
        """Move this rank's stages to the device, and free the parameters of other stages.

        Every rank must call it. Modules on the meta device are initialized on every rank, one after
        the other, and get rank 0's values. Under ``shard``, the stages are sharded.

        Raises:
            PlanError: a stage cannot be sharded, or a module leaves a tensor uninitialized.
        """
        device, mine, engine = self.root_device, self._mine, self._engine
        broadcast_from_first(model, device)
        for name, module in model.named_modules():
            materialize(module, model, device, device, recurse=False)
            own = dict(module.named_parameters(recurse=False))
            homes = {key: how.homes.get(f"{name}.{key}" if name else key, mine[0]) for key in own}
            local = {key: one for key, one in own.items() if homes[key] in mine}
            for tensor in (*local.values(), *module.buffers(recurse=False)):
                tensor.data = tensor.data.to(device)
            free_remote(name, module, local, device)
        made = {index: how.make(index, self._count) for index in mine}
        self._parts = {index: Part(stage, model, plan.forward_context) for index, stage in made.items()}
        for part in self._parts.values() if self._shards_stages else ():
            with Faults("strategy") as faults:
                units = units_of(part, engine, faults)
            shard(part, units, self.device_mesh["data_parallel"], device, engine.policy.reduce_dtype)

    def model_to_device(self) -> None:
        """Do nothing, because ``setup`` moves only this rank's stages."""

    # ------------------------------------------------------------------ steps

    def on_train_start(self) -> None:
        """Raise PlanError if the last batch of the training data would be smaller.

        This is known before the first batch if the data set has a length. Otherwise each batch is
        checked.
        """
        trainer = self._user_module.trainer
        loader: Any = trainer.train_dataloader
        with suppress(AttributeError, TypeError):  # an iterable data set has no length
            left = len(loader.sampler) % loader.batch_size
            if left and trainer.num_training_batches >= len(loader) and not loader.drop_last:
                given = f"a last batch of {left} rows after batches of {loader.batch_size}"
                raise refused(f"{given} does not fit the pipeline's buffers", "use DataLoader(drop_last=True)")

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward passes of a batch, and return the mean loss.

        Every rank must call it. The returned loss is a leaf. Its backward pass only restores the
        gradients of the schedule.

        Raises:
            PlanError: ``pipeline_batch`` or ``pipeline_loss`` returns something else than the
                schedule needs. Also raised if a batch has another shape than the first one, if
                stages have different batches, or if a stage computes with a weight of another
                stage. With replicas that are not sharded, also if a trained parameter has no
                gradient.
        """
        trainer = self._user_module.trainer
        inputs, target = self._batch(args[0], training=True)
        afresh = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0
        with self._engine.training_step(), self._gradients.stashing(afresh=afresh):
            with self._stream.drawn():
                loss = self._run(inputs, target, self._pieces, "step")
            for name, parameter in self._user_module.named_parameters():
                if is_remote(parameter) and parameter.grad is not None:
                    raise refused(
                        f"a pipeline_loss or a stage that computes with {name!r}, which another stage holds",
                        "put what a loss adds for weights into the optimizer (weight_decay), or use strategy='mp_ddp'",
                    )
            if self.replica_group.size() > 1 and not self.shard and not accumulates(trainer):
                average(self._gradients.parameters, self.replica_group, to_torch(plan_of(self).policy.reduce_dtype))
        self._user_module.log("train_loss", loss, batch_size=len(inputs[0]))
        return self._gradients.loss(loss)

    def _evaluate(self, name: str, batch: Any, *_args: Any) -> Tensor:
        """Run the forward pass of a batch, log its mean loss as ``name``, and return it.

        Every rank must call it. A batch that cannot be split evenly runs as one micro-batch.

        Raises:
            PlanError: ``pipeline_batch`` or ``pipeline_loss`` returns something else than the
                schedule needs, or stages have different batches.
        """
        inputs, target = self._batch(batch, training=False)
        with self._gradients.untouched():
            loss = self._run(inputs, target, 1 if len(inputs[0]) % self._pieces else self._pieces, "eval")
        for part in self._parts.values():
            if isinstance(part, FSDPModule):  # unsharded weights would hide the shards from a second fit's optimizer
                part.reshard()
        self._user_module.log(name, loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(inputs[0]))
        return loss

    def _batch(self, batch: Any, *, training: bool) -> tuple[tuple[Tensor, ...], Any]:
        """Return inputs and target of a batch, and set the stages to the module's training mode.

        In an epoch's first batch, all stages compare their batches. This is a collective.

        Raises:
            PlanError: ``pipeline_batch`` returned no pair of tensors with the same number of rows.
                Or a training batch does not fit the micro-batches or the first batch's shape. Or
                stages have different batches.
        """
        module: Any = self._user_module
        for part in self._parts.values():
            part.train_own(module.training)
        pair: Any = module.pipeline_batch(batch)
        if not issubclass(type(pair), tuple) or len(pair) != 2:
            raise refused(f"pipeline_batch, which returned {type(pair).__name__}", "return (inputs, target)")
        inputs: Any = pair[0] if isinstance(pair[0], tuple) else pair[:1]
        target = pair[1]
        tensors: list[Tensor] = [*tensors_in(inputs), *tensors_in(target)]
        rows = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
        if len(rows) != 1 or not all(isinstance(one, Tensor) for one in inputs):
            raise refused(
                f"pipeline_batch with tensors of {' and '.join(map(str, sorted(rows)))} rows",
                "give every tensor the rows of the batch, or keep what has none in the module",
            )
        if training:
            self._check_shapes(rows.pop(), [tensor.shape for tensor in inputs])
        place = module.trainer.current_epoch, training
        if self._compared != place:
            self._compared = place
            # A checksum of bytes does not depend on the order of a sum. It costs a copy to the
            # host.
            held = (tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
            if apart(map(crc32, held), self.root_device, self.stage_group):
                raise refused(
                    "other batches on one stage than on another",
                    "call seed_everything() before data is made, and give a sampler of your own num_replicas and rank "
                    "of trainer.strategy.distributed_sampler_kwargs",
                )
        return inputs, target

    def _check_shapes(self, rows: int, shapes: list[torch.Size]) -> None:
        """Raise PlanError if a batch cannot be split evenly, or differs from the first in shape."""
        if rows % self._pieces:
            raise refused(
                f"a batch of {rows} rows with microbatches={self._pieces}",
                f"use a batch size that is a multiple of {self._pieces}, with drop_last=True",
            )
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            given = f"a batch of shape {[*map(tuple, shapes)]} after batches of {[*map(tuple, self._shapes)]}"
            raise refused(given, "pad to one length, and use DataLoader(drop_last=True)")

    def _run(self, inputs: tuple[Tensor, ...], target: Any, number: int, how: str) -> Tensor:
        """Run a batch in ``number`` micro-batches, and return the mean loss on every rank.

        ``how`` is ``"eval"`` for the forward pass only, and ``"step"`` for both passes. Every rank
        must call it.
        """
        # Stages send only gradients that trained parameters need, so the key has requires_grad.
        trained = tuple(parameter.requires_grad for parameter in self._user_module.parameters())
        key = how, number, torch.is_inference_mode_enabled(), tuple(tensor.shape for tensor in inputs), trained
        schedule = self._made.pop(key, None) or self._new_schedule(number, how)
        self._made[key] = schedule  # now the last entry of the dict
        alike = [kept for kept in self._made if kept[0] == how]
        for oldest in alike[:-_KEPT_SCHEDULES]:
            del self._made[oldest]
        last = self._count - 1 in self._parts
        self._targets = [map_tensors(target, lambda one, at=at: one.chunk(number)[at]) for at in range(number)]
        self._losses = []
        places = {"target": torch.arange(number)} if last else {}
        getattr(schedule, how)(*(inputs if 0 in self._parts else ()), **places, return_outputs=False)
        self._targets = ()
        mean = torch.zeros((), dtype=torch.float32, device=self.root_device)
        if last:
            mean = torch.stack(self._losses).mean().to(mean)
        dist.broadcast(mean, group_src=self.stage_group.size() - 1, group=self.stage_group)
        return mean

    def _new_schedule(self, number: int, how: str) -> Any:
        several, group, device = self._schedule in SEVERAL, self.stage_group, self.root_device
        forward_only = pipelining.ScheduleLoopedBFS if several else pipelining.ScheduleGPipe
        schedule: Any = SCHEDULES[self._schedule] if how == "step" else forward_only
        stages = [WatchedStage(part, index, self._count, device, group=group) for index, part in self._parts.items()]
        # _loss_of divides the loss before scaling, because a scaled sum overflows sooner than a
        # mean.
        loss_of = partial(self._loss_of, stages[-1], how == "step")
        return schedule(stages if several else stages[0], number, loss_fn=loss_of, scale_grads=False)

    def _loss_of(self, stage: WatchedStage, training: bool, output: Any, place: Tensor) -> Tensor:
        """Return the loss of a micro-batch.

        In training it is divided by the micro-batches of a step, and times the loss scale.

        ``place`` is the index of the micro-batch. While torch infers shapes, any loss is returned.
        Otherwise the plain loss is kept for the mean.

        Raises:
            PlanError: ``pipeline_loss`` returned no scalar tensor, or one without a graph in
                training.
        """
        if stage.shapes_only:  # any loss of all outputs will do
            return torch.stack([one.float().square().sum() for one in floating_in(output)]).sum()
        module: Any = self._user_module
        with plan_of(self).forward_context():
            loss = module.pipeline_loss(output, self._targets[int(place)])
        trains = any(one.requires_grad for one in tensors_in(output))
        if not isinstance(loss, Tensor) or loss.ndim or (trains and not loss.requires_grad):
            what = tuple(loss.shape) if isinstance(loss, Tensor) and loss.ndim else type(loss).__name__
            raise refused(
                f"pipeline_loss, which returned {what}",
                "return the mean over the rows of the micro-batch, computed from the output without detach() or item()",
            )
        self._losses.append(loss.detach())
        if not training:
            return loss
        return self._engine.scaler.scale(loss / (self._pieces * module.trainer.accumulate_grad_batches))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Raise PlanError, because only the last stage has the output."""
        fix = "load the checkpoint into the plain module and predict with strategy='mp_ddp' or 'mp_fsdp2'"
        raise refused("trainer.predict under pipeline parallelism", fix)

    validation_step: Any = partialmethod(_evaluate, "val_loss")
    test_step: Any = partialmethod(_evaluate, "test_loss")

    def share_buffers(self) -> None:
        """Broadcast the buffers of the first replica to the others. Every rank must call it."""
        for part in self._parts.values() if self.replica_group.size() > 1 else ():
            share_buffers(part, self.root_device, self.replica_group)

    on_validation_start = on_test_start = on_train_end = share_buffers

    def teardown(self) -> None:
        super().teardown()
        own: Any = {} if self.lightning_module is None else vars(self.lightning_module)
        for name in [name for name in _STEPS if own.get(name) is _never]:
            del own[name]
        self._made.clear()

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights of all stages on rank 0, and this rank's weights on others.

        Tensors are on the CPU. Buffers of the first replica are broadcast to the others before.
        Every rank must call it.
        """
        self.share_buffers()
        assert self._cut is not None
        homes, size, every = self._cut.homes, self.stage_group.size(), self._user_module.state_dict()
        rank = dist.get_rank(self.stage_group)
        whole = self._gathered({n: whole_on_cpu(one) for n, one in every.items() if homes.get(n, rank) % size == rank})
        return {name: whole[name] for name in every if name in whole}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state of all stages on rank 0, and this rank's state on others.

        Parameters are numbered as in a plain model's optimizer. Every rank must call it.
        """
        content = by_parameter(optimizer.state_dict(), optimizer, _local)
        return {**content, "state": dict(sorted(self._gathered(content["state"]).items()))}

    def _gathered(self, mine: dict[Any, Any]) -> dict[Any, Any]:
        """Return the entries of all stages of the first replica on rank 0, and ``mine`` on others.

        Stages send one after the other, to save memory. Every rank of the first replica must call
        it.
        """
        group = self.stage_group
        if dist.get_rank(self.replica_group) > 0:
            return mine
        whole = dict(mine)
        for rank in range(1, group.size()):
            if dist.get_rank(group) == rank:
                dist.send_object_list([mine], group_dst=0, group=group, device=self.root_device)
            elif dist.get_rank(group) == 0:
                received: list[Any] = [None]
                dist.recv_object_list(received, group_src=rank, group=group, device=self.root_device)
                whole = {**received[0], **whole}
        return whole

    load_whole_weights = PlanStrategy.load_sharded_weights
    load_whole_states = PlanStrategy.load_sharded_states


def _never(*args: Any, **kwargs: Any) -> None:
    """Stand in for a step that the module does not define, and that is never called."""
    raise RuntimeError("the schedule runs instead of this step")


def _local(parameter: Tensor | None, values: Mapping[str, Any]) -> dict[str, Any] | None:
    if parameter is None or is_remote(parameter):
        return None
    return {key: whole_on_cpu(value) for key, value in values.items()}
