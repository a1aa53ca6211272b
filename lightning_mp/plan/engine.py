"""The optimizer step under a policy: the base of all engines, and that for one device and DDP.

Methods stand in the order of their calls.
"""

# No postponed annotations here: DDP refuses a communication hook whose annotations are strings.

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

#: Runs the last batch forward and backward again to find its first non-finite value. Gradients are
#: not summed over ranks. ``None`` if the batch cannot be run again.
Replay = Callable[[], Tensor | None] | None
NOTHING = nullcontext()
_REQUIRES_GRAD = attrgetter("requires_grad")
_MARKS = count()


class StepEngine(ABC):
    """The application of a policy on one kind of strategy. Each kind has a subclass."""

    #: True if the strategy's own engine runs backward, by ``backward``
    runs_backward: ClassVar[bool] = False
    #: If not empty, optimizers that evaluate their closure again are refused, also without a loss
    #: scale. The text says where, for the message.
    evaluates_once: ClassVar[str] = ""
    #: (kind of shard, description) pairs of the optimizers' parameters; empty if they are whole
    steps: tuple[tuple[optimizer_facts.Shards, str], ...] = ()
    #: by ``id``, names of the fp32 weights that are gathered in half precision
    halves: Mapping[int, str] = MappingProxyType({})
    #: name, for messages, of a wrapper that reduces gradients only in Lightning's ``backward``
    reduces = ""
    #: the context around hooks in which users may read gradients
    hook_watch: AbstractContextManager[Any] = NOTHING

    def __init__(self, policy: PrecisionPolicy, *, device: torch.device, scaler: LossScaler, distributed: bool) -> None:
        self.policy, self.device, self.scaler = policy, device, scaler
        scaler.checks = scaler.enabled or policy.nonfinite.action != "ignore"
        self.distributed = distributed
        #: True under manual optimization: gradients are unscaled after each backward pass, because
        #: users clip and step by hand
        self.manual = False
        #: the strategy's optimizers at the last check; a user may replace or wrap them later
        self.optimizers: list[Optimizer] = []
        #: optimizers that evaluate their closure again (LBFGS, SAM) and step as in stock
        self.unchecked: list[Optimizer] = []
        #: optimizers whose step may read the loss, or request another pass, through its closure
        self.with_closure: list[Optimizer] = []
        #: optimizers with stochastic rounding
        self.rounding: list[Optimizer] = []
        #: True if a backward pass began since the last step
        self.pending = False
        #: the global gradient norm before the last clipping by norm, on the device
        self.last_norm: Tensor | None = None
        #: Called with the reason why the run has to end. It ends the run after the batch. If it is
        #: ``None``, the step raises.
        self.report: Callable[[str], object] | None = None
        #: the batch norms that take their statistics over all ranks
        self.synced: list[nn.Module] = []
        #: the modules that run in FP8, and every candidate with the reason if it does not
        self.converted, self.fp8_layers = list[nn.Module](), list[fp8.FP8Layer]()
        #: the Trainer's state, whose ``stage`` is the present one, and the stage of training
        self.stages: tuple[Any, Any] | None = None
        #: the methods whose first call was watched
        self._watched: set[str] = set()
        self._module: nn.Module | None = None
        #: the pin of each covered module; known after ``check``
        self.pin_map = pins.PinMap()
        self._places: pins.Places = []
        #: by name, the LSTMs that may have no kernel in the dtype of autocast; known after ``check``
        self.lstms: dict[str, nn.Module] = {}
        #: the modules that recompute their activations; known after ``check``
        self.recomputed: list[nn.Module] = []
        #: True once the check ran that those modules do recompute
        self._told_of_recomputation = False
        self._applied = ExitStack()
        self._loss: Tensor | None = None
        #: undoes the hooks and patches that ``connect`` installs
        self._connected = ExitStack()
        #: the number of steps after which the budget can first be spent
        self._next_check = 0
        #: the module's parameters, and the ``requires_grad`` of each at the last training step
        self._parameters: list[nn.Parameter] = []
        self._trained: list[bool] = []
        #: the parameters of the module and of all optimizers
        self._all_parameters: list[Tensor] = []
        #: by ``id``, the parameters that an optimizer updates
        self._updated: dict[int, Tensor] = {}
        #: the module's parameters that no optimizer updates
        self._not_updated: list[Tensor] = []
        #: True if the last loss was scaled
        self._loss_is_scaled = False
        #: True while the backward pass of a scaled loss is under way
        self._scaled_pass = False
        #: rank 0's seed of stochastic rounding; known after the first step of such an optimizer
        self._seed: int | None = None
        self._own_seed = 0
        #: optimizer classes for which a message said that their gradients are not checked
        self._told_unchecked = set[str]()
        #: True once a warning said that losses are not scaled
        self._unscaled_losses_told = False
        #: the mark of gradients that come from this engine's scaled losses
        self._mark = next(_MARKS)

    # ------------------------------------------------------------------ the module

    def check(self, module: nn.Module, faults: Faults) -> None:
        """Add to ``faults`` every reason why the policy cannot be applied to ``module``.

        The module is not changed. The engine keeps the modules that ``prepare`` will change.

        Raises:
            MissingExtraError: ``"fp8-mixed"`` without torchao.
            PlanError: an unsupported release of torchao.
        """
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
        """Return, by name, the LSTMs that this CPU may be unable to run under autocast.

        The result is empty on other devices, and without autocast.
        """
        dtype = self.policy.compute_dtype
        if self.device.type != "cpu" or dtype == self.policy.storage_dtype:
            return {}
        return lstms.without_kernel(module, to_torch(dtype), (member.module for member in self.pin_map.members))

    def stored_dtypes(self) -> Callable[[Tensor], torch.dtype]:
        """Return a function from a parameter of the checked module to its storage dtype."""
        assert self._module is not None
        other = to_torch(self.policy.storage_dtype)
        own = pins.kept_dtypes(self._module, other)
        pinned = {key: to_torch(dtype) for key, dtype in self.pin_map.dtypes().items()}
        return lambda parameter: pinned.get(id(parameter)) or own.get(id(parameter), other)

    def fp32_names(self) -> dict[str, list[str]]:
        """Return, by half format, the names of tensors that stay fp32 if the rest is cast to it.

        A pin to fp32 or the model itself decides that. A format without such tensors is left out.
        """
        assert self._module is not None
        return pins.fp32_names(self._module, {member.module: member.pin.dtype for member in self.pin_map.members})

    def prepare(self, module: nn.Module) -> None:
        """Change ``module`` in place: pin, cast the rest, synchronize, convert to FP8, checkpoint.

        ``check`` must have run before.
        """
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
        """Set ``dtype`` of every LightningModule in ``module`` as ``module.to(dtype)`` would.

        It is the pin's dtype for a pinned module, else the policy's storage dtype. A module in
        float64 keeps it if that dtype is fp32.
        """
        pinned = {id(member.module): member.pin.dtype for member in self.pin_map.members}
        for part in module.modules():
            dtype = to_torch(pinned.get(id(part), self.policy.storage_dtype))
            # An fp32 plan leaves parameters in float64 as they are.
            set_dtype(part, dtype, kept=torch.float64 if dtype == torch.float32 else None)

    def check_optimizers(self, optimizers: Iterable[Optimizer], faults: Faults) -> None:
        """Add a fault for each optimizer that cannot step under the policy."""
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
        """Log, once for each class, that gradients of a second pass within a step are not checked.

        Nothing is logged if the policy checks no gradients.

        Raises:
            PlanError: no optimizer may evaluate its closure again, because there is a loss scale or
                weights are sharded.
        """
        if self._steps_once:
            with Faults() as faults:
                self._add_evaluates_again(optimizer, faults)
        name = type(optimizer).__name__
        if self.scaler.checks and name not in self._told_unchecked:
            self._told_unchecked.add(name)
            rank_zero_info(f"{name} evaluates its closure again within a step: its gradients are not checked")

    def connect(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Begin to step ``optimizers``. ``model`` is the module as the strategy wrapped it.

        The scaler forgets its notes about gradients. Under a loss scale, a global hook refuses
        steps of optimizers that the plan does not make.

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
        """Step these optimizers from now on. Log once, by class, if gradients are not checked.

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
        """Keep the parameters that optimizers update, and the module's other parameters."""
        self._updated = updated
        self._not_updated = [parameter for parameter in self._parameters if id(parameter) not in updated]
        self._all_parameters = [*updated.values(), *self._not_updated]

    def follow_optimizers(self) -> None:
        """Take the Trainer's present optimizers and groups, if they changed since the last check.

        Finetuning callbacks add a group during the run. Its gradients are then unscaled with the
        optimizer's, and no longer with the gradients of parameters that no optimizer updates.
        Nothing happens outside a fit.

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
        """Undo all changes of the module except pins and dtypes.

        Checkpointing, FP8, synchronized batch norms and LSTM changes are undone, and hooks are
        removed. Pins stay because the dtypes that they protect stay.
        """
        self._applied.close()
        if self.scaler.enabled:
            self.scaler.within_run = False
        self._connected.close()
        self._module, self._loss = None, None

    # ------------------------------------------------------------------ the step

    def training_step(self) -> AbstractContextManager[Any]:
        """Check for changes of the module, and return the context for ``training_step``.

        The context of the first step raises a PlanError if a pinned weight runs in another dtype
        outside its module. After the first backward pass, a warning names modules that were
        chosen for checkpointing and do not recompute.

        Raises:
            PlanError: a pinned module was replaced during the run.
            RuntimeError: under DDP or FSDP1, parameters were frozen or unfrozen within an
                accumulation window. Under ZeRO, they were at any time in the run.
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
        """Warn of modules that were chosen for checkpointing, have gradients and do not recompute.

        Nothing calls the forward of such a module. The check is skipped if torch.compile was used.
        """
        assert self._module is not None, "training_step() before check()"
        self._told_of_recomputation = True
        # Recomputation inside a compiled graph is invisible here.
        kept = [] if traces_graphs(self._module) else checkpointing.kept_after_all(self._module, self.recomputed)
        if kept:
            named = ", ".join(map(repr, kept[:3])) + (f" and {len(kept) - 3} more" if len(kept) > 3 else "")
            rank_zero_warn(
                f"checkpointing has no effect on {named}: nothing calls the forward of "
                f"{'it' if len(kept) == 1 else 'them'}, and activations are kept. Name the modules that are called"
            )

    def first_step(self, method: str) -> AbstractContextManager[Any]:
        """Return the context that watches the first call of ``method``.

        The context does nothing in later calls, after a watched ``training_step``, and if there is
        nothing to watch.
        """
        if self._module is None or not self._watched.isdisjoint(("training_step", method)):
            return NOTHING
        self._watched.add(method)
        return self._first_step(self._module)

    def _first_step(self, module: nn.Module) -> AbstractContextManager[Any]:
        halves = self.halves if "training_step" in self._watched else {}
        if not (self.pin_map.members or halves):
            return NOTHING
        return first_step.FirstStep(module, self.pin_map.members, self.policy.compute_dtype, halves)

    def explain(self, error: BaseException) -> None:  # noqa: B027  whole weights need no explanation
        """Add a sentence to the text of an error of torch's that ended the run, if the engine knows its cause."""

    def on_trained_changed(self) -> None:  # noqa: B027  strategies that check every step do nothing
        """React to parameters that were frozen or unfrozen since the last step.

        This method does nothing. Subclasses override it.
        """

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, or unchanged without a scale or an optimizer.

        There is no optimizer if a module adapts itself in ``test_step``, or if
        ``configure_optimizers`` returned None. In the second case a warning is given once.
        Gradients that an earlier pass left unscaled are multiplied by the scale again.

        Raises:
            PlanError: a new optimizer cannot step under the policy.
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
        """Run backward. Only called if ``runs_backward``.

        Raises:
            NotImplementedError: always, unless a subclass overrides it.
        """
        raise NotImplementedError

    def after_backward(self) -> None:
        """Mark the gradients of a scaled loss. Under manual optimization, unscale them.

        Users of manual optimization clip before they step. After an unscaled loss nothing happens.

        Raises:
            PlanError: no optimizer updates the module, and no gradient reached the optimizers.
        """
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
        """Raise a PlanError if no parameter of an optimizer has a gradient.

        Other code that updates the module would then read scaled gradients.
        """
        updated = [parameter for each in self.optimizers for parameter in grads.parameters_of(each)]
        if all(parameter.grad is None for parameter in updated):
            names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
            raise PlanError.of(
                f"configure_optimizers() returned {names} with no parameter of the module, with "
                f"precision={self.policy.precision!r}: whatever trains the module gets gradients times the loss scale",
                "return None from it, and losses are not scaled; or choose 'bf16-mixed' or '32-true'",
            )

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale gradients and note, in the same pass, if they are finite on this rank.

        Gradients that are unscaled already are only checked. Without checks, gradients of the
        optimizer stay as they are.

        Raises:
            PlanError: the loss of these gradients was not scaled, or nothing reduced them.
        """
        if self.manual:
            self.begin_manual_step(optimizer)
        self.scaler.check_finite_(optimizer)
        # Users clip, and compute norms, over all parameters of the module.
        if self._loss_is_scaled and not self.manual:
            self.scaler.divide_unchecked_(self._not_updated)

    def begin_manual_step(self, optimizer: Optimizer) -> None:
        """Update the loss scale if the optimizer has stepped since its last update.

        The steps before this one then form a group of their own.

        Raises:
            PlanError: no gradient was reduced over ranks, because the user called
                ``loss.backward()`` instead of ``manual_backward``.
        """
        if self.reduces and self._loss is None:
            raise PlanError.of(
                f"loss.backward() with {self.reduces}, which reduces gradients in self.manual_backward(loss) alone",
                "write self.manual_backward(loss)",
            )
        if self.scaler.enabled and self.scaler.stepped(optimizer):
            self.scaler.update()

    def check_finite_again(self, optimizer: Optimizer) -> None:
        """Check gradients again, because the user's hooks may have changed them."""
        self.scaler.check_finite_(optimizer)

    @abstractmethod
    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Clip by the global 2-norm, computed in fp32. Keep the norm in ``last_norm``."""

    def clip_value(self, optimizer: Optimizer, value: float) -> None:
        """Clip every entry to ``[-value, value]``.

        Gradients are checked first, because clipping makes infinite entries finite.
        """
        self.scaler.check_finite_(optimizer)
        held = [parameter for parameter in grads.parameters_of(optimizer) if parameter.grad is not None]
        if held:  # torch's function raises without gradients, as in a frozen pipeline stage
            torch.nn.utils.clip_grad_value_(held, value)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Step the optimizer, or skip the step if a gradient was not finite on some rank.

        A skipped step changes no parameter and no optimizer state. On several ranks this is a
        collective if gradients are checked. Return the value of the optimizer's ``step``, or
        ``None`` if it was not called.

        Raises:
            RuntimeError: the optimizer has stepped since the last update of the loss scale.
        """
        with self._rounded_alike(optimizer):
            result = self.scaler.step_checked(optimizer, **kwargs)
        self.pending = False
        return result

    def _rounded_alike(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Return the context for a step in which stochastic rounding is equal on every rank.

        Otherwise replicas would differ. The first such step of a run is a collective: every rank
        takes rank 0's seed and keeps it. For other optimizers the context does nothing.
        """
        if not self.distributed or not any(optimizer is each for each in self.rounding):
            return NOTHING
        if self._seed is None:
            self._seed = rng.of_first_rank(self._own_seed, self.device)
        return rng.seeded(rng.seed_of_step(self._seed, self.scaler.attempts), self.device)

    def _refuse_untracked(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Raise if a step that the plan does not make would apply gradients of a scaled loss.

        A step of another optimizer passes if its gradients come from a loss without a scale.

        Raises:
            PlanError: an optimizer of the run is stepped without Lightning's wrapper, or another
                one steps with such gradients.
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
        """Update the loss scale, and check the budget of skipped steps.

        Under manual optimization the scale is updated only after every optimizer has stepped.

        Raises:
            NonFiniteError: as in ``check_budget``.
        """
        scaler = self.scaler
        if scaler.enabled and (not self.manual or all(map(scaler.stepped, self.optimizers))):
            scaler.update()
        if scaler.attempts >= self._next_check:
            self.check_budget(replay)

    def close_group(self) -> None:
        """Update the loss scale at the end of ``training_step``, if an optimizer stepped in it.

        Optimizers that did not step are not waited for.

        Raises:
            NonFiniteError: as in ``check_budget``.
        """
        # The scaler knows: a callback may have replaced the optimizers since the step began.
        if self.scaler.group_open:
            self.scaler.update()
            self.check_budget(None)

    # ------------------------------------------------------------------ the budget

    def check_budget(self, replay: Replay) -> None:
        """Report or raise if the run has to end: see ``verdict``.

        With ``report`` set, the reason is passed to it, and nothing is raised. Otherwise the error
        names the first non-finite module and rank. On several ranks finding them is a collective.

        Raises:
            NonFiniteError: too many skipped steps in a row, or, with ``nonfinite="raise"``, a loss
                that is not finite.
            LossScaleError: an overflow at the lowest loss scale, with ``at_min="raise"``.
        """
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
        """Return the reason why the run has to end after the last step, or ``None``.

        The check is a device sync, so it is delayed as long as the budget allows. Until then the
        result is ``None``. With ``nonfinite="raise"`` under a loss scale, a skipped step makes it a
        collective.
        """
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
        """True if the loss, before it was scaled, is not finite on some rank.

        A device sync. On several ranks it is a collective. False without a loss.
        """
        if self._loss is None:
            return False
        bad = (~torch.isfinite(self._loss)).any().float()
        if self.distributed:
            max_over_ranks_(bad)
        return bool(bad)

    def reset_skip_streak(self) -> None:
        """Set the number of skipped steps in a row to 0, after a rewind."""
        self.scaler.load_counts({**self.scaler.counts(), "streak": 0})
        self._next_check = 0

    @property
    def loss_scale(self) -> float | None:
        """Return the loss scale, or ``None`` without one. A device sync."""
        return self.scaler.get_scale() if self.scaler.enabled else None


def max_over_ranks_(flag: Tensor) -> None:
    """Replace ``flag`` by its maximum over all ranks, in place. A collective."""
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)


# ------------------------------------------------------------------ one device and DDP


class EagerEngine(StepEngine):
    """The engine for one device and DDP, where each rank has whole gradients."""

    _ddp: DistributedDataParallel | None = None

    def connect(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Begin to step ``optimizers``, and set the dtype in which DDP sums gradients.

        DDP broadcasts buffers with autocast off until the run ends.

        Raises:
            PlanError: an optimizer cannot step under the policy.
        """
        super().connect(model, optimizers)
        if isinstance(model, DistributedDataParallel):
            self._ddp, self.reduces = model, "DDP"
            self._set_reduce_dtype(model)
            outside = sharding_compat.ddp_buffers_outside_autocast(model, self.device.type)
            self._connected.enter_context(outside)

    def _set_reduce_dtype(self, ddp: DistributedDataParallel) -> None:
        """Make DDP sum gradients in ``reduce_dtype`` instead of their own dtypes.

        float64 and complex gradients keep their dtype. DDP gets no hook if every other gradient is
        in ``reduce_dtype`` already.
        """
        dtype = to_torch(self.policy.reduce_dtype)
        summed = {each.dtype for each in ddp.parameters() if each.requires_grad and each.is_floating_point()}
        if summed - {dtype, torch.float64}:
            ddp.register_comm_hook(dtype, average_in)

    def on_trained_changed(self) -> None:
        """Make DDP sum the gradients of the parameters that are trained now.

        Raises:
            RuntimeError: an accumulation window is open, so gradients may not be summed yet.
        """
        if self._ddp is not None:
            if self.pending:
                given = "parameters frozen or unfrozen within an accumulation window, with DDP"
                raise RuntimeError(str(Fault(given, fix="change them after a step, or use strategy='mp_fsdp2'")))
            # DDP collects the parameters only when it is constructed or unpickled.
            self._ddp.__setstate__(self._ddp.__getstate__())
            if not sharding_compat.register_comm_hooks(self._ddp):
                self._set_reduce_dtype(self._ddp)

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Clip by the global 2-norm, computed in fp32. Keep the norm in ``last_norm``."""
        self.last_norm = grads.clip_grad_norm_(grads.parameters_of(optimizer), max_norm)


def average_in(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket over all ranks in ``dtype``, as a communication hook of DDP.

    float64 and complex buckets are averaged in their own dtype. The future returns the bucket's
    gradient. It is overwritten in place.
    """
    gradient = bucket.buffer()
    wire = gradient if gradient.is_complex() or gradient.dtype == torch.float64 else gradient.to(dtype)
    work: Any = dist.all_reduce(wire.div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: gradient.copy_(done.value()[0]))
