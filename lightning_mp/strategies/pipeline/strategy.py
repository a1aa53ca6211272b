"""Pipeline parallelism for a LightningModule that says what its stages are; transformers' Llama and GPT-2 need not."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import RandomSampler

from lightning_mp.compat.lightning import (
    LightningModule,
    ModelParallelStrategy,
    Trainer,
    TrainerFn,
    accumulates,
    default_pg_timeout,
    keep_sampler,
    layer_sync_of,
    optimizers_to_device,
    rank_zero_info,
    set_mesh,
)
from lightning_mp.engines.base import StepEngine
from lightning_mp.engines.sharded import PipelineEngine
from lightning_mp.errors import Faults, PlanError
from lightning_mp.modules.remote import free_remote, is_remote
from lightning_mp.numerics.dtypes import to_torch
from lightning_mp.numerics.rng import Stream
from lightning_mp.precision import MixedPrecisionPlan
from lightning_mp.strategies.common import RunsPlan, plan_of
from lightning_mp.strategies.meta_device import materialize
from lightning_mp.strategies.pipeline import checks
from lightning_mp.strategies.pipeline.checkpoints import PipelineCheckpoints
from lightning_mp.strategies.pipeline.gradients import Replicas, StashedGradients, refuse_remote_gradients
from lightning_mp.strategies.pipeline.schedules import SCHEDULES, Batches, Layout, Pipeline
from lightning_mp.strategies.pipeline.stages import Cut, Part, shard_part
from lightning_mp.strategies.sharding import broadcast_from_first, share_buffers


@dataclass(slots=True)
class _Run:
    """What one run of a Trainer uses."""

    pipeline: Pipeline
    batches: Batches
    gradients: StashedGradients
    averaged: Replicas | None
    #: parameters of the other stages, by name
    remote: dict[str, Tensor]
    stream: Stream


class PlanPipelineStrategy(RunsPlan, PipelineCheckpoints, ModelParallelStrategy):
    """``torch.distributed.pipelining`` under a plan: every rank holds a stage, a batch goes through in micro-batches.

    The module has ``pipeline_batch(batch) -> (inputs, target)``, a pure ``pipeline_loss(output, target) -> Tensor`` and
    ``pipeline_stage(index, count) -> nn.Module``, which is made for transformers' Llama-like models and GPT-2.
    ``training_step`` and ``validation_step`` are not called: ``train_loss`` and ``val_loss`` are logged.

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
        checks.arguments(stages, schedule, microbatches, data_parallel_size, virtual_stages)
        self._stages, self._schedule, self._microbatches = stages, schedule, microbatches
        self._replicas, self.shard, self._virtual = data_parallel_size, shard, virtual_stages
        self._layout: Layout | None = None
        self._cut: Cut | None = None
        #: the module that was cut, and its stages on this rank by index
        self._cut_from: weakref.ref[nn.Module] | None = None
        self._parts: dict[int, Part] = {}
        self._run: _Run | None = None

    # ------------------------------------------------------------------ processes

    @property
    def layout(self) -> Layout:
        """Stages, schedule and micro-batches; known once the processes are."""
        assert self._layout is not None, "before setup_environment()"
        return self._layout

    @property
    def stage_group(self) -> dist.ProcessGroup:
        """The ranks of this pipeline, in the order of their stages."""
        return self.device_mesh.get_group("pipeline")

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same stage as this one."""
        return self.device_mesh.get_group("data_parallel")

    @property
    def parameter_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups over which what each rank holds of the parameters adds up to all of them."""
        return (self.replica_group, self.stage_group) if self.shards_stages else (self.stage_group,)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every stage of a replica draws the same batches."""
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
        """Start the process group and lay the mesh.

        Raises:
            PlanError: the stages do not divide the processes.
        """
        world = self.num_nodes * self.num_processes
        stages, replicas = self._sizes(world)
        if stages * replicas != world or stages < 2:
            raise PlanError.of(
                f"stages={stages} and data_parallel_size={replicas} with {world} processes",
                f"start {max(stages, 2) * replicas} processes, or choose sizes whose product is {world}",
                "strategy",
            )
        per_rank = self._virtual if SCHEDULES[self._schedule].several else 1
        self._layout = Layout(self._schedule, stages, self._microbatches or 4 * stages, per_rank)
        self._setup_distributed()
        names = ("pipeline", "data_parallel")
        self._device_mesh = init_device_mesh(self.root_device.type, (stages, replicas), mesh_dim_names=names)
        assert self.lightning_module is not None
        set_mesh(self.lightning_module, self._device_mesh)

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
        checks.install_steps(model)

    def check_plan(self, engine: StepEngine, module: nn.Module, faults: Faults) -> Cut | None:
        """Decide which parameter goes where; notes what cannot be, changes nothing."""
        return checks.module(
            cast("LightningModule", module),
            engine,
            self.layout,
            faults,
            known=self.cut_of(module),
            shards=self.shards_stages,
            syncs_batch_norm=layer_sync_of(self) is not None,
        )

    def setup(self, trainer: Trainer) -> None:
        """Apply the plan, keep this rank's stages, then make the optimizers."""
        assert self.accelerator is not None
        assert isinstance(self.model, LightningModule)
        self.accelerator.setup(trainer)
        if self.replica_group.size() == 1:
            keep_sampler(trainer)
        plan, fitting = plan_of(self), trainer.state.fn == TrainerFn.FITTING
        cut: Cut = plan.apply(self.model)
        self._keep_stages(self.model, cut, plan)
        self.barrier()
        if fitting:
            rank_zero_info(
                f"{type(self.model).__name__} is trained in {self.layout.count} pipeline stages: pipeline_batch and "
                "pipeline_loss are called, training_step and validation_step are not."
            )
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            optimizers_to_device(self.optimizers, self.root_device)

    def cut_of(self, model: nn.Module) -> Cut | None:
        """How an earlier run of this strategy cut ``model``, whose other stages are where they were."""
        return self._cut if self._cut_from is not None and self._cut_from() is model else None

    @property
    def shards_stages(self) -> bool:
        """Whether FSDP2 shards each stage over its replicas."""
        return self.shard and self.replica_group.size() > 1

    def _keep_stages(self, model: LightningModule, cut: Cut, plan: MixedPrecisionPlan) -> None:
        if self.cut_of(model) is None:
            self._cut, self._cut_from = cut, weakref.ref(model)
            self._keep_local(model, cut)
            made = {index: cut.make(index, cut.count) for index in self._mine}
            self._parts = {index: Part(stage, plan.forward_context) for index, stage in made.items()}
            for part in self._parts.values() if self.shards_stages else ():
                assert plan.engine is not None
                shard_part(part, plan.engine, self.device_mesh["data_parallel"], self.root_device)
        layout, group, named = self.layout, self.stage_group, dict(model.named_parameters())
        homes = [(one, cut.parameters.get(name, -1)) for name, one in named.items()]
        batches = Batches(model, layout.microbatches, group, plan.forward_context)
        own = [parameter for part in self._parts.values() for parameter in part.parameters()]
        whole = not self.shards_stages and self.replica_group.size() > 1
        self._run = _Run(
            Pipeline(layout, self._parts, group, self.root_device, batches.loss, homes),
            batches,
            StashedGradients(own, sharded=self.shards_stages),
            Replicas(own, self.replica_group, to_torch(plan.policy.reduce_dtype)) if whole else None,
            {name: one for name, one in named.items() if is_remote(one)},
            # one seed serves all processes: without streams of their own the stages would draw the same dropout masks
            Stream(dist.get_rank(group), self.root_device),
        )

    @property
    def _running(self) -> tuple[LightningModule, _Run]:
        assert self.lightning_module is not None
        assert self._run is not None
        return self.lightning_module, self._run

    @property
    def _mine(self) -> range:
        """The stages on this rank."""
        return range(dist.get_rank(self.stage_group), self.layout.count, self.layout.stages)

    def _keep_local(self, model: LightningModule, cut: Cut) -> None:
        """Keep what this rank's stages have; what is on the meta device every rank makes module by module."""
        broadcast_from_first(model, self.root_device)
        device, mine = self.root_device, (-1, *self._mine)
        for name, module in model.named_modules():
            materialize(module, model, device, device, recurse=False)
            own = dict(module.named_parameters(recurse=False))
            local = {key: one for key, one in own.items() if cut.parameters[f"{name}.{key}" if name else key] in mine}
            for tensor in (*local.values(), *module.buffers(recurse=False)):
                tensor.data = tensor.data.to(device)
            free_remote(name, module, local, device)

    def model_to_device(self) -> None:
        """It is there; what other stages hold must not be made here."""

    # ------------------------------------------------------------------ steps

    def on_train_start(self) -> None:
        """Refuse a smaller last batch before the first one is drawn."""
        assert self.lightning_module is not None
        checks.loader(self.lightning_module.trainer)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the schedule on a batch; the backward pass of the loss that is returned restores its gradients."""
        module, run = self._running
        trainer, engine = module.trainer, plan_of(self).engine
        assert engine is not None
        inputs, target = self._taken(args[0], training=True)
        afresh = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0
        pieces = self.layout.microbatches * trainer.accumulate_grad_batches
        with engine.training_step():
            run.gradients.begin(afresh=afresh)
            with run.stream.drawn():
                loss = run.pipeline.train(inputs, target, lambda one: engine.scaler.scale(one / pieces))
            refuse_remote_gradients(run.remote)
            if run.averaged is not None and not accumulates(trainer):
                run.averaged.average()
            run.gradients.stash()
        module.log("train_loss", loss, batch_size=len(inputs[0]))
        return run.gradients.loss(loss)

    def _taken(self, batch: Any, *, training: bool) -> tuple[tuple[Tensor, ...], Any]:
        module, run = self._running
        for part in self._parts.values():
            part.follow_mode(module)
        return run.batches.of(batch, training=training)

    def validation_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the schedule's forward on a batch; ``val_loss`` is logged on every rank."""
        return self._evaluate(args[0], "val_loss")

    def test_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the schedule's forward on a batch; ``test_loss`` is logged on every rank."""
        return self._evaluate(args[0], "test_loss")

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: only the last stage has the output."""
        fix = "load the checkpoint into the plain module and predict with strategy='mp_ddp' or 'mp_fsdp2'"
        raise PlanError.of("trainer.predict under pipeline parallelism", fix, "strategy")

    def _evaluate(self, batch: Any, name: str) -> Tensor:
        module, run = self._running
        inputs, target = self._taken(batch, training=False)
        with run.gradients.untouched():
            loss = run.pipeline.evaluate(inputs, target)
        for part in self._parts.values():
            if isinstance(part, FSDPModule):  # what stays gathered hides the shards from a second fit's optimizer
                part.reshard()
        module.log(name, loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(inputs[0]))
        return loss

    # ------------------------------------------------------------------ buffers

    def _share_buffers(self) -> None:
        """The first replica's, as under DDP: the model is evaluated with what is saved."""
        if self.replica_group.size() > 1:
            for part in self._parts.values():
                share_buffers(part, self.root_device, self.replica_group)

    on_validation_start = on_test_start = on_train_end = _share_buffers

    def teardown(self) -> None:
        """As the host does; the stages stay where they are."""
        super().teardown()
        checks.remove_steps(self.lightning_module)
        self._run = None
