"""Pipeline parallelism for a LightningModule that says what its stages are; transformers' Llama and GPT-2 need not."""

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

#: schedules for training and for evaluation each, by the shapes of their batches: each has buffers for its inputs
_KEPT_SCHEDULES = 4
_MODES = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
#: the steps that Lightning asks for and that are not called here
_STEPS = ("training_step", "validation_step", "test_step")


class PlanPipelineStrategy(PlanStrategy, ModelParallelStrategy):
    """``torch.distributed.pipelining`` under a plan: every rank holds a stage, a batch goes through in micro-batches.

    The module has ``pipeline_batch(batch) -> (inputs, target)``, a pure ``pipeline_loss(output, target) -> Tensor`` and
    ``pipeline_stage(index, count) -> nn.Module``, which is made for transformers' Llama-like models and GPT-2.
    ``training_step`` and ``validation_step`` are not called: ``train_loss`` and ``val_loss`` are logged. A checkpoint
    is one file with the plain model's names, whatever the number of stages.

    Args:
        stages: ranks of a pipeline; by default all processes that ``data_parallel_size`` leaves.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved_1f1b"``.
        microbatches: pieces of a batch, as if as many batches were accumulated; four a stage by default.
        data_parallel_size: pipelines with data of their own; by default what ``stages`` leaves of the processes.
        shard: shard each stage over its replicas with FSDP2, instead of keeping whole ones.
        virtual_stages: stages on a rank, under the interleaved schedule.
        process_group_backend: as in Lightning.
        timeout: as in Lightning.

    Raises:
        PlanError: at once: a value out of range. At start: a module that cannot be cut, or lacks its part.
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
        #: the module that was cut, how, and its stages on this rank by index
        self._cut_from: nn.Module | None = None
        self._cut: Cut | None = None
        self._parts: dict[int, Part] = {}
        #: torch's schedules, by what they were made for, and the targets and the losses of the one that runs
        self._made: dict[Any, Any] = {}
        self._targets: Sequence[Any] = ()
        self._losses: list[Tensor] = []
        #: the shapes of the inputs to train on
        self._shapes: list[torch.Size] | None = None
        #: the epoch whose first batch was compared, and whether it was one to train on
        self._compared: tuple[int, bool] | None = None

    # ------------------------------------------------------------------ processes

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        group = self.replica_group
        return {"num_replicas": group.size(), "rank": dist.get_rank(group)}

    def process_dataloader(self, dataloader: Any) -> Any:
        """With one pipeline the user's sampler is kept, as on one process; what it draws by chance all stages share."""
        sampler = getattr(dataloader, "sampler", None)
        if isinstance(sampler, RandomSampler) and sampler.generator is None:
            seed = int(torch.randint(2**62, ()))
            sampler.generator = torch.Generator().manual_seed(self.broadcast(seed))
        return dataloader

    def setup_environment(self) -> None:
        world = self.num_nodes * self.num_processes
        stages, replicas = self._sizes(world)
        if stages * replicas != world or stages < 2:
            given = f"stages={stages} and data_parallel_size={replicas} with {world} processes"
            fix = f"start {max(stages, 2) * replicas} processes, or choose sizes whose product is {world}"
            raise refused(given, fix)
        self._setup_distributed()
        names = ("pipeline", "data_parallel")
        self._device_mesh = init_device_mesh(self.root_device.type, (stages, replicas), mesh_dim_names=names)
        set_mesh(self._user_module, self._device_mesh)
        #: the ranks of this pipeline, in the order of their stages, and those that hold the same stage as this one
        self.stage_group, self.replica_group = map(self._device_mesh.get_group, names)
        #: whether FSDP2 shards each stage over its replicas
        self._shards_stages = self.shard and replicas > 1
        #: the groups over which what each rank holds of the parameters adds up to all of them
        self.parameter_groups = (*((self.replica_group,) if self._shards_stages else ()), self.stage_group)
        #: stages in all, virtual ones included, and those on this rank
        self._count = stages * (self._virtual if self._schedule in SEVERAL else 1)
        self._mine = range(dist.get_rank(self.stage_group), self._count, stages)
        #: the pieces of a training batch
        self._pieces = self._microbatches or 4 * stages

    def degrees(self, world: int) -> tuple[int, int, int]:
        """Of ``world`` processes the replicas, the shards of each, and the stages."""
        stages, replicas = self._sizes(world)
        return (1, replicas, stages) if self.shard else (replicas, 1, stages)

    def _sizes(self, world: int) -> tuple[int, int]:
        replicas = 1 if self._replicas == "auto" else int(self._replicas)
        stages = self._stages or world // replicas
        return stages, max(world // max(stages, 1), 1) if self._replicas == "auto" else replicas

    # ------------------------------------------------------------------ the model

    def connect(self, model: LightningModule) -> None:
        """As the host does; a module without ``training_step`` is trained all the same."""
        super().connect(model)
        trainer = trainer_of(model)
        without_data = trainer is not None and trainer.state.fn == TrainerFn.FITTING and not validates(trainer)
        left_out = "validation_step" if without_data else ""  # Lightning warns of one that has no data
        missing = (name for name in _STEPS if name != left_out and not is_overridden(name, model))
        vars(model).update(dict.fromkeys(missing, _never))

    def check_plan(self, engine: StepEngine, module: nn.Module, faults: Faults) -> Cut | None:
        """Decide which parameter goes where; notes what cannot be, changes nothing."""
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
        # one seed serves all processes: without streams of their own the stages would draw the same dropout masks
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
        """Keep what this rank's stages have; what is on the meta device every rank makes module by module."""
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
        """Nothing: what other stages hold must not be made here."""

    # ------------------------------------------------------------------ steps

    def on_train_start(self) -> None:
        """Refuse a smaller last batch before the first one is drawn."""
        trainer = self._user_module.trainer
        loader: Any = trainer.train_dataloader
        with suppress(AttributeError, TypeError):  # an iterable data set; each batch is checked when it comes
            left = len(loader.sampler) % loader.batch_size
            if left and trainer.num_training_batches >= len(loader) and not loader.drop_last:
                given = f"a last batch of {left} rows after batches of {loader.batch_size}"
                raise refused(f"{given} does not fit the pipeline's buffers", "use DataLoader(drop_last=True)")

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the schedule on a batch; the backward pass of the loss that is returned restores its gradients."""
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
        """Run the schedule's forward, in one piece where a batch cannot be split evenly; log the loss on every rank."""
        inputs, target = self._batch(batch, training=False)
        with self._gradients.untouched():
            loss = self._run(inputs, target, 1 if len(inputs[0]) % self._pieces else self._pieces, "eval")
        for part in self._parts.values():
            if isinstance(part, FSDPModule):  # what stays gathered hides the shards from a second fit's optimizer
                part.reshard()
        self._user_module.log(name, loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(inputs[0]))
        return loss

    def _batch(self, batch: Any, *, training: bool) -> tuple[tuple[Tensor, ...], Any]:
        """Inputs and target of a batch, for which the stages are set to train or to evaluate as the module is."""
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
            # of whole numbers, so that no order of a sum is in it; a copy to the host once an epoch
            held = (tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
            if apart(map(crc32, held), self.root_device, self.stage_group):
                raise refused(
                    "other batches on one stage than on another",
                    "call seed_everything() before data is made, and give a sampler of your own num_replicas and rank "
                    "of trainer.strategy.distributed_sampler_kwargs",
                )
        return inputs, target

    def _check_shapes(self, rows: int, shapes: list[torch.Size]) -> None:
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
        """Forward (``"eval"``), and backward (``"step"``), of ``number`` micro-batches; all ranks get the mean loss."""
        # stages hand on the gradients that those need which are trained
        trained = tuple(parameter.requires_grad for parameter in self._user_module.parameters())
        key = how, number, torch.is_inference_mode_enabled(), tuple(tensor.shape for tensor in inputs), trained
        schedule = self._made.pop(key, None) or self._new_schedule(number, how)
        self._made[key] = schedule  # the last one used is the last one of the dict
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
        # the loss is divided before it is scaled: a loss scale times a sum overflows sooner than times a mean
        loss_of = partial(self._loss_of, stages[-1], how == "step")
        return schedule(stages if several else stages[0], number, loss_fn=loss_of, scale_grads=False)

    def _loss_of(self, stage: WatchedStage, training: bool, output: Any, place: Tensor) -> Tensor:
        if stage.shapes_only:  # a loss of every number of the output
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
        """Refuse: only the last stage has the output."""
        fix = "load the checkpoint into the plain module and predict with strategy='mp_ddp' or 'mp_fsdp2'"
        raise refused("trainer.predict under pipeline parallelism", fix)

    validation_step: Any = partialmethod(_evaluate, "val_loss")
    test_step: Any = partialmethod(_evaluate, "test_loss")

    def share_buffers(self) -> None:
        """Broadcast those of the first replica."""
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
        """The weights of all stages on the CPU of rank 0; those of this rank on others."""
        self.share_buffers()
        assert self._cut is not None
        homes, size, every = self._cut.homes, self.stage_group.size(), self._user_module.state_dict()
        rank = dist.get_rank(self.stage_group)
        whole = self._gathered({n: whole_on_cpu(one) for n, one in every.items() if homes.get(n, rank) % size == rank})
        return {name: whole[name] for name in every if name in whole}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state for all parameters on rank 0, numbered as a plain model's optimizer numbers them."""
        content = by_parameter(optimizer.state_dict(), optimizer, _local)
        return {**content, "state": dict(sorted(self._gathered(content["state"]).items()))}

    def _gathered(self, mine: dict[Any, Any]) -> dict[Any, Any]:
        """On rank 0, what every stage of the first replica has; on others their own. One stage travels at a time."""
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
    raise RuntimeError("the schedule runs instead of this step")


def _local(parameter: Tensor | None, values: Mapping[str, Any]) -> dict[str, Any] | None:
    if parameter is None or is_remote(parameter):
        return None
    return {key: whole_on_cpu(value) for key, value in values.items()}
