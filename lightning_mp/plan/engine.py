"""One optimizer step under a policy, whatever shards it, and that of one device and DDP; methods in order of calls."""

# No postponed annotations here: DDP checks those of a communication hook, and refuses strings.

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import count
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_mp.compat import torch_sharding as sharding_compat
from lightning_mp.compat.lightning import TrainerFn, rank_zero_info, rank_zero_warn, set_dtype, trainer_of
from lightning_mp.compat.torch import (
    in_backward,
    makes_optimizer_state,
    mark_of,
    set_mark,
    traces_graphs,
)
from lightning_mp.compat.torchao import require as require_torchao
from lightning_mp.errors import Fault, Faults, PlanError
from lightning_mp.modules import checkpointing, first_step, fp8, lstms, pins, sync_batchnorm
from lightning_mp.numerics import grads, rng
from lightning_mp.numerics.dtypes import to_torch
from lightning_mp.numerics.loss_scale import LossScaler, unwrapped
from lightning_mp.plan import diagnosis, optimizer_facts
from lightning_mp.plan.diagnosis import AT_MIN
from lightning_mp.policy import PrecisionPolicy

#: runs the last batch forward and backward again, without summing over ranks, to find what broke it; or cannot
Replay = Callable[[], Tensor | None] | None
NOTHING = nullcontext()
_REQUIRES_GRAD = attrgetter("requires_grad")
_MARKS = count()


class StepEngine(ABC):
    """Carries a policy out on one kind of strategy; what differs between kinds is in subclasses."""

    #: whether the strategy's own engine runs backward, by ``backward``
    runs_backward: ClassVar[bool] = False
    #: where optimizers that evaluate their closure again are refused, loss scale or not
    evaluates_once: ClassVar[str] = ""
    #: where optimizers do not step whole parameters: (kind of shard, description) pairs
    steps: tuple[tuple[optimizer_facts.Shards, str], ...] = ()
    #: by ``id``, names of the fp32 weights that are gathered in half precision
    halves: Mapping[int, str] = MappingProxyType({})
    #: what reduces gradients in Lightning's ``backward`` alone, for people
    reduces = ""
    #: around hooks in which users may look at gradients
    hook_watch: AbstractContextManager[Any] = NOTHING

    def __init__(self, policy: PrecisionPolicy, *, device: torch.device, scaler: LossScaler, distributed: bool) -> None:
        self.policy, self.device, self.scaler = policy, device, scaler
        scaler.checks = scaler.enabled or policy.nonfinite.action != "ignore"
        self.distributed = distributed
        #: gradients are unscaled after each backward pass, for users who clip and step by hand
        self.manual = False
        #: those of the strategy, as they were at the last look: a user may replace or wrap them
        self.optimizers: list[Optimizer] = []
        #: those of them that evaluate their closure again (LBFGS, SAM): they step as under stock Lightning
        self.unchecked: list[Optimizer] = []
        #: those of them whose step may read the loss, or ask for another pass, through its closure
        self.with_closure: list[Optimizer] = []
        #: those of them that round at random
        self.rounding: list[Optimizer] = []
        #: gradients came in since the last step
        self.pending = False
        #: the global gradient norm of the last clipping, before it, on the device
        self.last_norm: Tensor | None = None
        #: is told why the run has to end, and acts on it after the batch; ``None`` where the step has to raise
        self.report: Callable[[str], object] | None = None
        #: the batch norms that take their statistics over all ranks
        self.synced: list[nn.Module] = []
        #: what runs in FP8, what does not, and the stage of the Trainer's run, as ``stage``, with that of training
        self.converted, self.fp8_layers = list[nn.Module](), list[fp8.FP8Layer]()
        self.stages: tuple[Any, Any] | None = None
        #: the methods whose first call was watched
        self._watched: set[str] = set()
        self._module: nn.Module | None = None
        #: which pin covers which module; known after ``check``
        self.pin_map = pins.PinMap()
        self._places: pins.Places = []
        #: by name, the LSTMs that may have no kernel in the dtype of autocast; known after ``check``
        self.lstms: dict[str, nn.Module] = {}
        #: the modules that recompute their activations; known after ``check``
        self.recomputed: list[nn.Module] = []
        #: whether it was looked at, after the first backward pass, that they are
        self._told_of_recomputation = False
        self._applied = ExitStack()
        self._loss: Tensor | None = None
        #: undoes the hooks and patches that ``connect`` installs
        self._connected = ExitStack()
        #: the number of steps after which the budget can first be spent
        self._next_check = 0
        #: of each parameter, whether it is trained
        self._parameters: list[nn.Parameter] = []
        self._trained: list[bool] = []
        #: the parameters of the module and of all optimizers, those that an optimizer updates by id, and the others
        self._all_parameters: list[Tensor] = []
        self._updated: dict[int, Tensor] = {}
        self._not_updated: list[Tensor] = []
        #: the last loss was scaled; its backward pass is under way
        self._loss_is_scaled = False
        self._scaled_pass = False
        #: the seed of rank 0, by which all ranks round; known after the first step of an optimizer that does
        self._seed: int | None = None
        self._own_seed = 0
        #: the classes of which a line said that their gradients are not checked
        self._told_unchecked = set[str]()
        #: a warning said that losses are not scaled
        self._unscaled_losses_told = False
        #: by which gradients are known that this engine's losses left
        self._mark = next(_MARKS)

    # ------------------------------------------------------------------ the module

    def check(self, module: nn.Module, faults: Faults) -> None:
        """Note what in ``module`` the policy cannot be carried out on; change nothing."""
        self._module = module
        self.pin_map = pins.resolve(
            module, self.policy.pins, faults, self.policy.storage_dtype, self.policy.buffer_dtype
        )
        if self.policy.fp8 is not None:
            require_torchao()
            pinned = [member.module for member in self.pin_map.covered]
            self.fp8_layers, self.converted = fp8.select(module, self.policy.fp8, pinned, faults)
        self.manual = not getattr(module, "automatic_optimization", True)
        self.lstms = self._lstms_without_kernel(module)
        if self.policy.checkpointing is not None:
            self.recomputed = checkpointing.select(module, self.policy.checkpointing, faults)

    def _lstms_without_kernel(self, module: nn.Module) -> dict[str, nn.Module]:
        """The LSTMs that autocast may not run on this CPU, by name."""
        dtype = self.policy.compute_dtype
        if self.device.type != "cpu" or dtype == self.policy.storage_dtype:
            return {}
        return lstms.without_kernel(module, to_torch(dtype), (member.module for member in self.pin_map.members))

    def stored_dtypes(self) -> Callable[[Tensor], torch.dtype]:
        """A function from a parameter of the checked module to the dtype it will be stored in."""
        assert self._module is not None
        other = to_torch(self.policy.storage_dtype)
        own = pins.kept_dtypes(self._module, other)
        pinned = {key: to_torch(dtype) for key, dtype in self.pin_map.dtypes().items()}
        return lambda parameter: pinned.get(id(parameter)) or own.get(id(parameter), other)

    def fp32_names(self) -> dict[str, list[str]]:
        """By half format, the names of weights that stay fp32 where the rest is cast to it: pinned, or declared."""
        assert self._module is not None
        return pins.fp32_names(self._module, {member.module: member.pin.dtype for member in self.pin_map.members})

    def prepare(self, module: nn.Module) -> None:
        """Cast what no pin covers, then synchronize, convert, pin and checkpoint, in place; ``check`` came before."""
        policy, compute = self.policy, to_torch(self.policy.compute_dtype)
        covered = {id(member.module) for member in self.pin_map.members}
        pins.remove(submodule for submodule in module.modules() if id(submodule) not in covered)
        pins.apply(self.pin_map, mixed=policy.mixed, compute_dtype=compute, device_type=self.device.type)
        pins.cast_unpinned(module, self.pin_map, policy)
        self._tell_dtype(module)
        self._applied.callback(sync_batchnorm.apply(self.synced))
        self._applied.callback(lstms.apply(self.lstms, policy.compute_dtype))
        if policy.fp8 is not None:
            undo = fp8.apply(self.converted, policy.fp8, compute, self.device.type, self.stages)
            self._applied.callback(undo)
        if policy.checkpointing is not None:
            self._applied.enter_context(checkpointing.apply(module, self.recomputed, policy.checkpointing))

    def _tell_dtype(self, module: nn.Module) -> None:
        """Have ``self.dtype`` of every LightningModule be the dtype of its parameters, as ``module.to(dtype)`` does."""
        pinned = {id(member.module): member.pin.dtype for member in self.pin_map.members}
        for part in module.modules():
            dtype = to_torch(pinned.get(id(part), self.policy.storage_dtype))
            # the parameters of a module in float64 stay in it where the plan stores fp32
            set_dtype(part, dtype, kept=torch.float64 if dtype == torch.float32 else None)

    def check_optimizers(self, optimizers: Iterable[Optimizer], faults: Faults) -> None:
        """Note which optimizers cannot step under the policy."""
        for optimizer in optimizers:
            if optimizer_facts.evaluates_again(optimizer) and self._steps_once:
                self._add_evaluates_again(optimizer, faults)
            else:
                for shards, where in self.steps:
                    optimizer_facts.check_shards(optimizer, shards, where, faults)

    @property
    def _steps_once(self) -> bool:
        """True if no optimizer may evaluate its closure again within a step."""
        return self.scaler.enabled or bool(self.evaluates_once)

    def _add_evaluates_again(self, optimizer: Optimizer, faults: Faults) -> None:
        where = self.evaluates_once or f"with precision={self.policy.precision!r}, whose loss scale may change"
        instead = "strategy='mp_ddp'" if self.evaluates_once else "'bf16-mixed' or '32-true'"
        given = f"{type(optimizer).__name__}, which evaluates its closure again, {where}"
        faults.add(given, fix=f"use an optimizer that steps once a batch (AdamW, SGD), or {instead}")

    def accept_another_pass(self, optimizer: Optimizer) -> None:
        """Say once of an optimizer that the gradients of a second pass within its step are not checked.

        Raises:
            PlanError: no optimizer may evaluate its closure again: there is a loss scale, or weights are sharded.
        """
        if self._steps_once:
            with Faults() as faults:
                self._add_evaluates_again(optimizer, faults)
        name = type(optimizer).__name__
        if self.scaler.checks and name not in self._told_unchecked:
            self._told_unchecked.add(name)
            rank_zero_info(f"{name} evaluates its closure again within a step: its gradients are not checked")

    def connect(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers, and the model as the strategy wrapped it.

        Raises:
            PlanError: an optimizer cannot step under the policy.
        """
        self._parameters = [] if self._module is None else list(self._module.parameters())
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self.take_optimizers(optimizers)
        self._connected.close()
        self.scaler.place(self.device)
        self.scaler.forget()
        if self.scaler.enabled:
            self.scaler.within_run = True
            if optimizers:
                self._connected.callback(register_optimizer_step_pre_hook(self._refuse_untracked).remove)
        self.scaler.sync = max_over_ranks_ if self.distributed else None
        self._next_check = 0
        self._own_seed = torch.initial_seed()
        self._seed = None
        self._places = [] if self._module is None else pins.places(self._module, self.pin_map)

    def take_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Step these optimizers from now on; say once of each class if its gradients are not checked.

        Raises:
            PlanError: an optimizer cannot step under the policy.
        """
        optimizers = [*map(unwrapped, optimizers)]
        with Faults() as faults:
            self.check_optimizers(optimizers, faults)
        self.optimizers = optimizers
        self.unchecked = [*filter(optimizer_facts.evaluates_again, optimizers)]
        for optimizer in self.unchecked:
            self.accept_another_pass(optimizer)
        self.with_closure = [*filter(optimizer_facts.takes_closure, optimizers)]
        self.rounding = [*filter(optimizer_facts.rounds_at_random, optimizers)]
        self.scaler.forget_others(optimizers)
        self._take_parameters(self._updated_parameters())

    def _updated_parameters(self) -> dict[int, Tensor]:
        """Return the parameters in the groups of all optimizers, by id."""
        return {id(parameter): parameter for each in self.optimizers for parameter in grads.parameters_of(each)}

    def _take_parameters(self, updated: dict[int, Tensor]) -> None:
        """Note which parameters the optimizers update, and which of the module's they do not."""
        self._updated = updated
        self._not_updated = [parameter for parameter in self._parameters if id(parameter) not in updated]
        self._all_parameters = [*updated.values(), *self._not_updated]

    def follow_optimizers(self) -> None:
        """Take the optimizers and groups that the Trainer has by now, if they were changed since the last look.

        Finetuning callbacks add a group in the run. Its gradients are divided by the loss scale once, with the
        optimizer's, and no longer with those of parameters that no optimizer updates.

        Raises:
            PlanError: a new optimizer cannot step under the policy.
        """
        trainer = trainer_of(self._module)
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return
        now = [*map(unwrapped, trainer.optimizers)]
        if [*map(id, now)] != [*map(id, self.optimizers)]:
            self.take_optimizers(now)
            return
        updated = self._updated_parameters()
        if updated.keys() != self._updated.keys():
            self._take_parameters(updated)

    def release(self) -> None:
        """Take checkpointing, FP8 and synchronization out again; pins stay, as the dtypes they protect do."""
        self._applied.close()
        if self.scaler.enabled:
            self.scaler.within_run = False
        self._connected.close()
        self._module, self._loss = None, None

    # ------------------------------------------------------------------ the step

    def training_step(self) -> AbstractContextManager[Any]:
        """Around ``training_step``, after a look at which parameters were frozen or unfrozen, and modules replaced.

        The first is watched: whatever computes with a pinned weight outside of its module is refused.

        Raises:
            PlanError: a pinned module was replaced in the run.
        """
        trained = [*map(_REQUIRES_GRAD, self._parameters)]
        if trained != self._trained:
            self._trained = trained
            self.on_trained_changed()
        if self._places:
            pins.refuse_replaced(self._places)
        if self.recomputed and self._loss is not None and not self._told_of_recomputation:
            self._tell_of_recomputation()
        return self.first_step("training_step")

    def _tell_of_recomputation(self) -> None:
        """After the first backward pass, warn of modules that were chosen for checkpointing and not recomputed."""
        assert self._module is not None, "training_step() before check()"
        self._told_of_recomputation = True
        # within a compiled graph recomputation cannot be seen
        kept = [] if traces_graphs(self._module) else checkpointing.kept_after_all(self._module, self.recomputed)
        if kept:
            named = ", ".join(map(repr, kept[:3])) + (f" and {len(kept) - 3} more" if len(kept) > 3 else "")
            rank_zero_warn(
                f"checkpointing has no effect on {named}: nothing calls the forward of "
                f"{'it' if len(kept) == 1 else 'them'}, and activations are kept. Name the modules that are called"
            )

    def first_step(self, method: str) -> AbstractContextManager[Any]:
        """Around a step: the first of ``method`` is watched, unless the first of training was."""
        if self._module is None or not self._watched.isdisjoint(("training_step", method)):
            return NOTHING
        self._watched.add(method)
        return self._first_step(self._module)

    def _first_step(self, module: nn.Module) -> AbstractContextManager[Any]:
        halves = self.halves if "training_step" in self._watched else {}
        if not (self.pin_map.members or halves):
            return NOTHING
        return first_step.FirstStep(module, self.pin_map.members, self.policy.compute_dtype, halves)

    def on_trained_changed(self) -> None:  # noqa: B027  nothing has to be done where a strategy looks at every step
        """Parameters were frozen or unfrozen since the last step."""

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return the loss to run backward on: times the scale, if there is one and an optimizer uses the gradients.

        No optimizer does where a module adapts itself in ``test_step``, and where ``configure_optimizers`` returned
        None. A warning says so once in a fit.

        Raises:
            PlanError: optimizers were replaced by those that cannot step under the policy.
        """
        self.follow_optimizers()
        self.pending, self._loss = True, loss.detach()
        scales = self.scaler.enabled and self.has_updated_parameters()
        if self.manual or self.scaler.any_waits:
            self.scaler.multiply_back_()
        if self.optimizers and self.scaler.enabled and not scales and not self._unscaled_losses_told:
            self._unscaled_losses_told = True
            rank_zero_warn(
                f"configure_optimizers() returned no optimizer. So losses are not scaled under precision="
                f"{self.policy.precision!r}, and gradients below 6e-8 become 0. Choose 'bf16-mixed' for optimizers "
                "that step elsewhere."
            )
        self._loss_is_scaled = self._scaled_pass = scales
        return self.scaler.scale(loss) if scales else loss

    def has_updated_parameters(self) -> bool:
        """True if an optimizer updates a parameter. Lightning makes one without any if a module returns None."""
        return any(group["params"] for optimizer in self.optimizers for group in optimizer.param_groups)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward, where ``runs_backward``."""
        raise NotImplementedError

    def after_backward(self) -> None:
        """Mark gradients of a scaled loss. Under manual optimization unscale them: users clip before they step."""
        if not self._scaled_pass:
            return
        self._scaled_pass = False
        for parameter in self._all_parameters:
            if parameter.grad is not None:
                set_mark(parameter.grad, self._mark)
        if self._parameters and len(self._not_updated) == len(self._parameters):
            self._refuse_unreached()
        if self.manual:
            self.scaler.divide_(self.optimizers, self._not_updated)

    def _refuse_unreached(self) -> None:
        """Raise a PlanError if the module trains without its optimizers: whatever updates it got scaled gradients."""
        updated = [parameter for each in self.optimizers for parameter in grads.parameters_of(each)]
        if all(parameter.grad is None for parameter in updated):
            names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
            raise PlanError.of(
                f"configure_optimizers() returned {names} with no parameter of the module, with "
                f"precision={self.policy.precision!r}: whatever trains the module gets gradients times the loss scale",
                "return None from it, and losses are not scaled; or choose 'bf16-mixed' or '32-true'",
            )

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring gradients unscaled and find out, in the same pass, whether they are finite on this rank."""
        if self.manual:
            self.begin_manual_step(optimizer)
        self.scaler.check_finite_(optimizer)
        if self._loss_is_scaled and not self.manual:  # users clip, and take norms, over all parameters of the module
            self.scaler.divide_unchecked_(self._not_updated)

    def begin_manual_step(self, optimizer: Optimizer) -> None:
        """Where the optimizer steps again, what came before was a group of its own.

        Raises:
            PlanError: nothing has reduced gradients, as a bare ``loss.backward()`` does not ask for it.
        """
        if self.reduces and self._loss is None:
            raise PlanError.of(
                f"loss.backward() with {self.reduces}, which reduces gradients in self.manual_backward(loss) alone",
                "write self.manual_backward(loss)",
            )
        if self.scaler.enabled and self.scaler.stepped(optimizer):
            self.scaler.update()

    def check_finite_again(self, optimizer: Optimizer) -> None:
        """Check again after the user's hooks, which may have changed the gradients."""
        self.scaler.check_finite_(optimizer)

    @abstractmethod
    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Clip by the global 2-norm, in fp32, and note it."""

    def clip_value(self, optimizer: Optimizer, value: float) -> None:
        """Clip every entry to ``[-value, value]``; checked first, since that makes infinite entries finite."""
        self.scaler.check_finite_(optimizer)
        held = [parameter for parameter in grads.parameters_of(optimizer) if parameter.grad is not None]
        if held:  # a pipeline's stage may be frozen, of which torch's function makes an error
            torch.nn.utils.clip_grad_value_(held, value)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Step the optimizer, or leave everything as it was if a gradient was not finite on some rank.

        Returns what the optimizer returned, ``None`` where the host knows of a skip.
        """
        with self._rounded_alike(optimizer):
            result = self.scaler.step_checked(optimizer, **kwargs)
        self.pending = False
        return result

    def _rounded_alike(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Around a step: an optimizer that rounds at random rounds alike on every rank, or replicas would differ.

        The first such step of a run is a collective: every rank takes the seed of rank 0, which it keeps.
        """
        if not self.distributed or not any(optimizer is each for each in self.rounding):
            return NOTHING
        if self._seed is None:
            self._seed = rng.of_first_rank(self._own_seed, self.device)
        return rng.seeded(rng.seed_of_step(self._seed, self.scaler.attempts), self.device)

    def _refuse_untracked(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Refuse a step that the plan does not make, if it would apply gradients of a scaled loss.

        Other steps are the user's own affair, as those of an optimizer on a loss without a scale.

        Raises:
            PlanError: an optimizer of the run is stepped past Lightning, or another one steps with such gradients.
        """
        if self.scaler.stepping or makes_optimizer_state():
            return
        name, under = type(optimizer).__name__, f"with precision={self.policy.precision!r}"
        if any(optimizer is each for each in self.optimizers):
            raise PlanError.of(
                f"{name}.step() called on the optimizer inside of Lightning's, {under}, whose gradients have to be "
                "unscaled and checked first",
                "call super().optimizer_step(...), or optimizer.step() on that one",
            )
        in_scaled_pass = self._scaled_pass and in_backward()
        stepped_with = [each.grad for each in grads.parameters_of(optimizer) if each.grad is not None]
        if any(in_scaled_pass or mark_of(gradient) == self._mark for gradient in stepped_with):
            raise PlanError.of(
                f"{name}.step() of an optimizer that configure_optimizers() did not return, {under}, whose gradients "
                "have to be unscaled and checked first",
                "return it from configure_optimizers(), or choose 'bf16-mixed' or '32-true', which have no loss scale",
            )

    def finish_step(self, replay: Replay) -> None:
        """Adjust the scale once every optimizer of the group stepped, by hand there may be many; look at the budget."""
        scaler = self.scaler
        if scaler.enabled and (not self.manual or all(map(scaler.stepped, self.optimizers))):
            scaler.update()
        if scaler.attempts >= self._next_check:
            self.check_budget(replay)

    def close_group(self) -> None:
        """``training_step`` is over: optimizers that did not step in it are not waited for."""
        if self.scaler.group_open:  # asked of the scaler: a callback may have replaced the optimizers of the start
            self.scaler.update()
            self.check_budget(None)

    # ------------------------------------------------------------------ the budget

    def check_budget(self, replay: Replay) -> None:
        """Raise if the budget of skips, or the floor under ``at_min="raise"``, was passed."""
        verdict = self.verdict()
        if verdict is not None and self.report is not None:
            self.report(verdict)
        elif verdict is not None:
            assert self._module is not None, "finish_step() before check()"
            trainer = trainer_of(self._module)
            step = self.scaler.attempts if trainer is None else trainer.global_step
            raise diagnosis.error(
                self._module, replay, verdict, step, self._loss, self.loss_scale, distributed=self.distributed
            )

    def verdict(self) -> str | None:
        """Why the run has to end after the last step, if it has; a device sync, as late as the budget allows."""
        rule, scaler = self.policy.nonfinite, self.scaler
        if scaler.attempts < self._next_check:
            return None
        raises = rule.action == "raise"
        if scaler.enabled and raises and scaler.step_skipped and self._loss_is_bad():
            return "the loss itself is not finite, which no loss scale can help (nonfinite='raise')"
        allowed = 0 if raises else rule.max_consecutive
        streak = scaler.streak if scaler.checks else 0
        if streak > allowed:
            many = "a step" if streak == 1 else f"{streak} steps in a row"
            return f"{many} with non-finite gradients, {allowed} allowed"
        if scaler.overflowed_at_min:
            return AT_MIN
        self._next_check = scaler.attempts + 1 + min(allowed - streak, scaler.backoffs_left())
        return None

    def _loss_is_bad(self) -> bool:
        """Whether the loss, before it was scaled, is not finite on some rank; a device sync."""
        if self._loss is None:
            return False
        bad = (~torch.isfinite(self._loss)).any().float()
        if self.distributed:
            max_over_ranks_(bad)
        return bool(bad)

    def reset_skip_streak(self) -> None:
        """Reset the skip streak: the run was rewound."""
        self.scaler.load_counts({**self.scaler.counts(), "streak": 0})
        self._next_check = 0

    @property
    def loss_scale(self) -> float | None:
        """The loss scale, ``None`` without one; a device sync."""
        return self.scaler.get_scale() if self.scaler.enabled else None


def max_over_ranks_(flag: Tensor) -> None:
    """Replace ``flag`` by its maximum over all ranks."""
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)


# ------------------------------------------------------------------ one device and DDP


class EagerEngine(StepEngine):
    """Carries a policy out where gradients are whole."""

    _ddp: DistributedDataParallel | None = None

    def connect(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers, and set in which dtype DDP sums gradients."""
        super().connect(model, optimizers)
        if isinstance(model, DistributedDataParallel):
            self._ddp, self.reduces = model, "DDP"
            self._set_reduce_dtype(model)
            outside = sharding_compat.ddp_buffers_outside_autocast(model, self.device.type)
            self._connected.enter_context(outside)

    def _set_reduce_dtype(self, ddp: DistributedDataParallel) -> None:
        """Have DDP, which sums each gradient in its own dtype, sum all in ``reduce_dtype``; float64 stays as it is."""
        dtype = to_torch(self.policy.reduce_dtype)
        summed = {each.dtype for each in ddp.parameters() if each.requires_grad and each.is_floating_point()}
        if summed - {dtype, torch.float64}:
            ddp.register_comm_hook(dtype, average_in)

    def on_trained_changed(self) -> None:
        """Have DDP sum what is trained from now on; a RuntimeError where gradients of before are not summed yet."""
        if self._ddp is not None:
            if self.pending:
                given = "parameters frozen or unfrozen within an accumulation window, with DDP"
                raise RuntimeError(str(Fault(given, fix="change them after a step, or use strategy='mp_fsdp2'")))
            # DDP notes the parameters when it is made, or unpickled
            self._ddp.__setstate__(self._ddp.__getstate__())
            if not sharding_compat.register_comm_hooks(self._ddp):
                self._set_reduce_dtype(self._ddp)

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Clip by the global 2-norm, in fp32."""
        self.last_norm = grads.clip_grad_norm_(grads.parameters_of(optimizer), max_norm)


def average_in(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The communication hook: average a bucket in ``dtype``, or float64 and complex ones in their own."""
    gradient = bucket.buffer()
    wire = gradient if gradient.is_complex() or gradient.dtype == torch.float64 else gradient.to(dtype)
    work: Any = dist.all_reduce(wire.div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: gradient.copy_(done.value()[0]))
