"""``ZeroEngine``: the optimizer step under DeepSpeed's ZeRO, and checks of it.

The ZeRO optimizer partitions, reduces and updates. The plan has the loss scale, skips steps and
counts them. DeepSpeed's fp16 and bf16 engines are off, because they cast every parameter and adjust
the scale before they unscale. Parameters are stored in the policy's dtypes, and autocast and pins
choose the dtypes of computations.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_mp.compat import patched
from lightning_mp.compat.deepspeed import Zero, gathered_changes_told, gathers, gathers_counted, is_partitioned
from lightning_mp.compat.lightning import trainer_of
from lightning_mp.compat.torch import function_caller, is_compiled, version
from lightning_mp.compat.torch_sharding import set_timeout
from lightning_mp.deepspeed.partitioned import PartitionedWeights, watched_hooks
from lightning_mp.errors import Fault, Faults
from lightning_mp.fsdp2.engine import FirstForward, ShardReads
from lightning_mp.numerics.loss_scale import unwrapped
from lightning_mp.plan import optimizer_facts
from lightning_mp.plan.alike import apart
from lightning_mp.plan.engine import StepEngine

_GRAD: Any = cast("Any", Tensor.grad)
#: packages that may read ``parameter.grad``: they read gradients from ZeRO's partitions
_KNOW = ("deepspeed.", "lightning_mp.")
#: clip_grad_norm_ and clip_grad_value_, which do nothing where gradients are None
_CLIPS = "torch.nn.utils.clip_grad"


class ZeroEngine(StepEngine):
    """The step engine of a policy on a ``deepspeed.DeepSpeedEngine`` with ZeRO stage 1, 2 or 3."""

    runs_backward = True
    evaluates_once = "with ZeRO"
    reduces = "ZeRO"
    steps = (("flat pieces", "ZeRO's pieces of flat tensors"),)
    #: the ZeRO optimizer and the trained weights, both ``None`` outside of training
    _zero: Any = None
    _weights: Any = None
    #: under ZeRO-3, checks reads and writes of weights in hooks
    _partitioned: PartitionedWeights | None = None
    #: under offload, the bits of the weights after the last step
    _bits: Tensor | None = None
    #: the norm to clip by if the Trainer has none
    _default_clip = 0.0
    #: for each param group, the index of the user's group that it was split off
    source_group: Sequence[int] = ()
    #: how long a rank waits for others, or None for torch's default
    timeout: timedelta | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.hook_watch = self._reads = GradientsElsewhere()
        #: holds ``_reads`` entered, from a manual backward pass to the step
        self._until_step = ExitStack()

    def check(self, module: nn.Module, faults: Faults) -> None:
        """Resolve the policy's patterns, and add a fault for ``nonfinite='ignore'``.

        ``module`` is not changed.
        """
        super().check(module, faults)
        if self.policy.nonfinite.action == "ignore":
            faults.add("nonfinite='ignore' with ZeRO", fix="use nonfinite='skip', or strategy='mp_fsdp2'")

    def check_optimizers(self, optimizers: Iterable[Optimizer], faults: Faults) -> None:
        """Add a fault for each optimizer that cannot step pieces of flat tensors.

        They are the user's optimizers, before ZeRO's takes their place.
        """
        for optimizer in optimizers:
            if len(optimizer_facts.parts(optimizer)) > 1:
                given = f"{type(optimizer).__name__} with ZeRO, an optimizer that holds another"
                faults.add(given, fix="use AdamW or SGD, or strategy='mp_ddp'")
            elif optimizer_facts.clips_by_norm(optimizer):
                given = f"{type(optimizer).__name__} with ZeRO, whose step clips by the norm of this rank's pieces"
                faults.add(given, fix="clip by Trainer(gradient_clip_val=...), or use strategy='mp_ddp'")
            else:
                super().check_optimizers([optimizer], faults)

    def connect(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take the DeepSpeedEngine ``model`` and its optimizer.

        DeepSpeed's loss scale is replaced by the plan's. ``optimizers`` is empty outside of a fit.
        On GPUs it is a collective, because it makes a process group.
        """
        super().connect(model, [])
        self.optimizers = list(optimizers)
        module = nn.Module() if self._module is None else self._module
        named = module.named_modules()
        parted = {name: part for name, part in named if any(map(is_partitioned, part.parameters(recurse=False)))}
        # Ranks compare every pass, on the host: to read the result from a GPU would be a sync for
        # each bucket.
        own = self.distributed and self.device.type != "cpu"
        group: Any = dist.new_group(backend="gloo", timeout=self.timeout) if own else None
        if own:
            self._connected.callback(dist.destroy_process_group, group)
        if parted and self.distributed:
            watch = FirstForward(model, parted, torch.device("cpu"), gathers=gathers, again=True, group=group)
            self._connected.callback(watch.release)
        if not optimizers:  # validation
            return
        zero = self._zero = Zero(model, optimizers[0])
        set_timeout([zero.optimizer.dp_process_group], self.timeout)
        trainer = trainer_of(self._module)
        if trainer is None or trainer.gradient_clip_val is None:  # else Lightning asks for it, or the user's hook
            self._default_clip = zero.clip_of_json
        self._weights = Trained(module, compares=self.distributed, by_window=zero.sums_every_pass, group=group)
        self._connected.callback(self._weights.hooks.close)
        self._connected.enter_context(zero.watched(self._weights.compare, self._raw_step))
        self._connected.enter_context(patched(zero.optimizer, add_param_group=refuse_new_group))
        split = [(name, parameter) for name, parameter in module.named_parameters() if is_partitioned(parameter)]
        if split and trainer is not None:
            partitioned = self._partitioned = PartitionedWeights(split)
            self._connected.enter_context(gathers_counted(partitioned.count_gathered))
            self._connected.enter_context(watched_hooks(trainer, partitioned))
        self.override_zero_settings()

    def override_zero_settings(self) -> None:
        """Replace DeepSpeed's loss scale by the plan's, also after DeepSpeed loaded a checkpoint.

        The present weights count as equal to the masters. Outside of training nothing happens.
        """
        if self._zero is not None:
            self._accept_writes()
            self._zero.install_scale(self.scaler if self.scaler.enabled else None, self._default_clip)

    # ------------------------------------------------------------------ the step

    def follow_optimizers(self) -> None:
        """Raise RuntimeError if the ZeRO optimizer was replaced or wrapped.

        DeepSpeed's engine steps only the optimizer of the start.
        """
        trainer = trainer_of(self._module)
        now = [] if trainer is None else [*map(unwrapped, trainer.optimizers)]
        if [*map(id, now)] != [*map(id, self.optimizers)]:
            self.refuse_new_optimizers()

    def refuse_new_optimizers(self) -> None:
        """Raise RuntimeError if training has begun.

        DeepSpeed's engine steps only the optimizer of the start.
        """
        if self._zero is not None:
            refuse(
                "trainer.optimizers replaced or wrapped, or strategy.setup_optimizers() called, in a run with ZeRO, "
                "whose own optimizer steps",
                "change optimizer.param_groups, or use strategy='mp_fsdp2'",
            )

    def has_updated_parameters(self) -> bool:
        """True in training. ZeRO-3's param groups are empty between steps, so they are not read."""
        return bool(self.optimizers)

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return the loss to run backward on, times the scale if there is one.

        Raises:
            RuntimeError: a second ``manual_backward()`` before a step. ZeRO would lose the first
                pass.
        """
        if self.manual and self.pending:
            refuse("two manual_backward() before a step with ZeRO", "add the losses up, or use strategy='mp_fsdp2'")
        return super().before_backward(loss)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run DeepSpeed's backward, which reduces.

        Lightning has divided ``loss`` by the window already. A collective.

        Raises:
            RuntimeError: ranks reached different parameters, or a parameter has no gradient.
        """
        with torch.autocast(self.device.type, enabled=False):  # manual optimization calls it within training_step
            self._zero.engine.backward(loss, *args, scale_wrt_gas=False, **kwargs)
        self._weights.finish_pass(ends_window=self._zero.engine.is_gradient_accumulation_boundary())

    def begin_window(self) -> None:
        """Drop the gradients of an accumulation window that the epoch before did not finish."""
        self._zero.forget_gradients()
        self._weights.begin_window()

    def on_trained_changed(self) -> None:
        """Raise RuntimeError if ``requires_grad`` of a parameter changed since the start."""
        if self._zero is not None and self._module is not None:
            self._weights.refuse_changed(self._module)

    def after_backward(self) -> None:
        """Under manual optimization, check reads of ``parameter.grad`` until the step.

        ZeRO holds the gradients.
        """
        if self.manual:
            self._until_step.close()
            self._until_step.enter_context(self._reads)

    @contextmanager
    def training_step(self) -> Generator[None, None, None]:
        """Check whether hooks changed weights, then return the base class's context.

        At its end reads of gradients are no longer checked.

        Raises:
            RuntimeError: see :meth:`check_weights`, and :meth:`on_trained_changed`.
        """
        self.check_weights()
        try:
            with super().training_step():
                yield
        finally:
            self._until_step.close()

    @contextmanager
    def _first_step(self, module: nn.Module) -> Generator[None, None, None]:
        split = self._zero is not None and self._weights.partitioned and not any(map(is_compiled, module.modules()))
        away = ShardReads(module, away=lambda parameter: not parameter.numel())
        writes = self._partitioned if split and self._partitioned is not None else nullcontext()
        with super()._first_step(module), away if split else nullcontext(), writes:
            yield

    def unscale(self, optimizer: Optimizer) -> None:
        """Begin a manual step.

        Gradients are not unscaled here: ``step`` unscales and checks them on all ranks.

        Raises:
            PlanError: a manual step without ``self.manual_backward(loss)``.
        """
        self._until_step.close()
        if self.manual:
            self.begin_manual_step(optimizer)

    def check_finite_again(self, optimizer: Optimizer) -> None:
        """Do nothing: DeepSpeed checks in its step.

        An offloaded partition must not be unscaled before it.
        """

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Make the next step clip by the norm over all partitions."""
        self._zero.optimizer.clip_grad = max_norm

    def clip_value(self, optimizer: Optimizer, value: float) -> None:
        """Raise RuntimeError: ZeRO has no clipping by value."""
        refuse("clip_gradients(gradient_clip_algorithm='value') with ZeRO", "clip by norm")

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Let DeepSpeed step or skip the step, and count it. Return ``None``. A collective.

        The clip norm is the default again afterwards, and ``last_norm`` the norm of this step.

        Raises:
            RuntimeError: ``training_step`` returned None at the end of an accumulation window, so
                that no gradient was reduced; or a weight was written to as in
                :meth:`check_weights`.
        """
        zero, weights = self._zero, self._weights
        if not zero.engine.is_gradient_accumulation_boundary():
            refuse(
                "a training_step that returned None on the last batch of a window of accumulation with ZeRO, which "
                "reduces in that batch's backward pass",
                "return a loss of zero, (parameter * 0).sum(), or use strategy='mp_fsdp2'",
            )
        weights.refuse_lost_writes()
        self.take_writes()
        groups = zero.optimizer.param_groups
        for place, origin in enumerate(self.source_group):  # pieces have the first one's options
            groups[place].update(groups[self.source_group.index(origin)] | {"params": groups[place]["params"]})
        self.pending, self.scaler.stepping = False, True
        try:
            applied, norm = zero.step()
        finally:
            self.scaler.stepping = False
        self._accept_writes()
        weights.begin_window()
        zero.optimizer.clip_grad = self._default_clip
        self.scaler.note_step(optimizer, torch.full((), float(not applied), dtype=torch.float32, device=self.device))
        self.last_norm = None if norm is None else torch.as_tensor(norm, dtype=torch.float32, device=self.device)

    def check_weights(self) -> None:
        """Copy values that a user assigned as ``weight.data`` into ZeRO's buffers.

        Outside of training do nothing.

        Raises:
            RuntimeError: a user wrote to a weight that ZeRO-3 has partitioned, or assigned another
                dtype, shape or device.
        """
        if self._zero is not None:
            self._weights.refuse_lost_writes()
            self._take_assigned()

    def take_writes(self) -> None:
        """Copy values that users wrote to weights into the master weights.

        Under ZeRO-1 and 2 all weights are copied at each call, because a write through
        ``weight.data`` leaves no trace. Under offload the copy would cross the bus, so it is made
        only if the weights' bits changed since the last step. Under ZeRO-3 it is made only after a
        write in ``GatheredParameters``.

        Raises:
            RuntimeError: a user assigned another dtype, shape or device.
        """
        if self._zero is None:
            return
        zero, weights = self._zero, self._weights
        self._take_assigned()
        written = weights.take_writes()
        if self._bits is not None:
            written |= not torch.equal(self._bits, zero.bits())
        if written or not (weights.partitioned or zero.offloads):
            zero.optimizer.refresh_fp32_params()

    def _accept_writes(self) -> None:
        """Note that the present weights are equal to the masters."""
        self._weights.accept_writes()
        watched = self._zero.offloads and not self._weights.partitioned
        self._bits = self._zero.bits() if watched else None

    def _take_assigned(self) -> None:
        """Copy values that a user assigned as ``weight.data`` into ZeRO's buffers.

        Raises:
            RuntimeError: dtype, shape or device differ from the buffer's.
        """
        for weight, place in self._zero.assigned_weights():
            if (weight.shape, weight.dtype, weight.device) != (place.shape, place.dtype, place.device):
                refuse(
                    f"{self._weights.name_of(weight)!r}.data = a tensor of {weight.dtype} and shape "
                    f"{tuple(weight.shape)} on {weight.device}, with ZeRO, which holds {place.dtype} and shape "
                    f"{tuple(place.shape)} on {place.device}",
                    "assign a tensor like the weight",
                )
            with torch.no_grad():
                place.copy_(weight.data)
            weight.data = place
            self._weights.note_write()

    def _raw_step(self, own: Any, closure: Any = None) -> None:
        """Step the ZeRO optimizer by its ``own`` step, called by DeepSpeed's engine.

        Raises:
            PlanError: the step is called outside of the plan's own step.
        """
        self._refuse_untracked(self._zero.optimizer, (), {})
        own(closure)

    def release(self) -> None:
        """Release the module as the base class does, and forget the ZeRO optimizer."""
        super().release()
        self._zero = self._weights = self._bits = self._partitioned = None


# ------------------------------------------------------------------ checks in the step


class GradientsElsewhere(TorchFunctionMode):
    """A torch function mode in which user code that reads ``parameter.grad`` is warned.

    ZeRO has moved gradients into its partitions, so ``parameter.grad`` of a trained parameter is
    ``None``. The warning is given once.

    Raises:
        RuntimeError: user code sets a trained parameter's ``grad``, or clips by torch's functions.
            Neither would change a gradient.
    """

    _warned = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sets = func == _GRAD.__set__
        touched = (sets or (func == _GRAD.__get__ and result is None)) and isinstance(args[0], nn.Parameter)
        if not touched or not args[0].requires_grad:
            return result
        reader = function_caller()
        if reader.startswith(_KNOW):
            return result
        if sets or reader == _CLIPS:
            refuse(
                f"{'parameter.grad set' if sets else 'gradients clipped by hand'} before the step, with ZeRO, which "
                "has moved the gradients into its partitions",
                "clip by the Trainer, or use strategy='mp_fsdp2'",
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{reader} reads parameter.grad, which is None here: ZeRO has moved the gradients into its partitions "
                "(said once a run). deepspeed.utils.safe_get_full_grad(parameter), called on every rank, has the "
                "gradient times the loss scale; plan.last_grad_norm has the norm of all after the step.",
                stacklevel=2,
            )
        return result


def refuse_new_group(param_group: Any) -> NoReturn:
    """Raise RuntimeError. It stands as ``add_param_group``, which a ZeRO optimizer does not have."""
    refuse(
        "optimizer.add_param_group() in a run with ZeRO, which partitions the param groups when the run starts",
        "make all groups in configure_optimizers(), with lr=0 until a group is to train, or use strategy='mp_fsdp2'",
    )


def refuse(given: str, fix: str) -> NoReturn:
    """Raise RuntimeError with the text of a fault: ``given`` is the problem, ``fix`` the remedy."""
    raise RuntimeError(str(Fault(given, fix=fix)))


def _refuse(names: Sequence[str], given: str, fix: str) -> None:
    if names:
        refuse(f"{names[0]!r} and {len(names) - 1} others {given}", fix)


class Trained:
    """The trained parameters that backward passes reached, and writes to them between steps.

    ZeRO reduces gradients by position, not by name. Ranks have to reach the same parameters in the
    same order.

    Args:
        module: the module, whose parameters get hooks until ``hooks`` is closed.
        compares: True if ranks compare the parameters that they reached. It is done on the host.
        by_window: True if a parameter needs a gradient in one pass of the window only, instead of
            in each pass.
        group: the process group that compares, ``None`` for all ranks.
    """

    def __init__(self, module: nn.Module, *, compares: bool, by_window: bool, group: Any = None) -> None:
        self._named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._compares, self._by_window, self._group = compares, by_window, group
        self._in_pass: dict[int, None] = {}
        self._in_window: set[int] = set()
        self._places = {id(parameter): place for place, parameter in enumerate(self._named.values())}
        #: weights that ZeRO-3 has partitioned, frozen weights too, and all trained weights
        self._watched = {
            name: parameter
            for name, parameter in module.named_parameters()
            if name in self._named or is_partitioned(parameter)
        }
        split = [parameter for parameter in self._watched.values() if is_partitioned(parameter)]
        #: True if ZeRO-3 has partitioned weights
        self.partitioned = bool(split)
        self._write_noted = False
        self.accept_writes()
        #: the hooks on parameters; ``connect`` has it closed
        self.hooks = ExitStack()
        for parameter in self._named.values():
            self.hooks.callback(parameter.register_post_accumulate_grad_hook(self._note).remove)
        for parameter in split:
            self.hooks.enter_context(gathered_changes_told(parameter, self._note_gathered_write))

    def refuse_changed(self, module: nn.Module) -> None:
        """Raise RuntimeError if parameters were frozen or unfrozen.

        ZeRO partitions the parameters that are trained at the start.
        """
        _refuse(
            [name for name, parameter in module.named_parameters() if parameter.requires_grad != (name in self._named)],
            "frozen or unfrozen in a run with ZeRO, which partitions what is trained when the run starts",
            "change it before trainer.fit(), and begin a second run there, or use strategy='mp_fsdp2'",
        )

    # ------------------------------------------------------------------ gradients

    def _note(self, parameter: Tensor) -> None:
        self._in_pass[self._places[id(parameter)]] = None

    def compare(self) -> None:
        """Raise RuntimeError on all ranks if they reached other parameters, or in another order.

        A collective if ``compares``. It is called before each reduction and at the end of each
        pass.
        """
        ranks = apart(self._in_pass, torch.device("cpu"), self._group) if self._compares else []
        if not ranks:
            return
        turns = [{place: turn for turn, place in enumerate(places)} for places in ranks]
        _refuse(
            [name for place, name in enumerate(self._named) if len({turn.get(place) for turn in turns}) > 1],
            "with a gradient on some ranks only, or in another order, with ZeRO, which sums what every rank has",
            "add 0 times what a rank does not use to its loss, or use strategy='mp_ddp' with "
            "find_unused_parameters=True",
        )

    def finish_pass(self, *, ends_window: bool) -> None:
        """Check the parameters that the pass reached, and begin the next pass.

        A collective if ``compares``.

        Raises:
            RuntimeError: ranks reached different parameters. Or a parameter has no gradient in the
                pass, or with ``by_window`` in the window at its end.
        """
        self.compare()
        self._in_window |= self._in_pass.keys()
        reached = self._in_window if self._by_window else self._in_pass
        if ends_window or not self._by_window:
            _refuse(
                [name for place, name in enumerate(self._named) if place not in reached],
                "without a gradient in a backward pass, with ZeRO, which steps them with what it has from another one",
                "freeze what is never used, add 0 times what a batch leaves out to its loss, or use "
                "strategy='mp_fsdp2'",
            )
        self._in_pass.clear()

    def begin_window(self) -> None:
        """Forget the parameters that passes of the last window reached."""
        self._in_window.clear()

    # ------------------------------------------------------------------ values

    def name_of(self, weight: Tensor) -> str:
        """Return the name of a trained weight in the module."""
        return next(name for name, parameter in self._named.items() if parameter is weight)

    def note_write(self) -> None:
        """Make the next :meth:`take_writes` return True."""
        self._write_noted = True

    def _note_gathered_write(self) -> None:
        self._write_noted = True
        self.accept_writes()

    def accept_writes(self) -> None:
        """Count later writes from now on, after a step or after a checkpoint was loaded."""
        #: torch's counts of in-place writes. A write to a partitioned weight is lost, unless it is
        #: gathered.
        self._versions = {name: version(parameter) for name, parameter in self._watched.items()}

    def _written(self) -> list[str]:
        return [name for name, before in self._versions.items() if version(self._watched[name]) != before]

    def take_writes(self) -> bool:
        """True if users wrote to weights since the last step.

        A noted write counts once. An in-place write counts until :meth:`accept_writes`.
        """
        written, self._write_noted = self._write_noted or bool(self._written()), False
        return written

    def refuse_lost_writes(self) -> None:
        """Raise RuntimeError if a user wrote to a partitioned weight, because the write is lost."""
        _refuse(
            self._written() if self.partitioned else (),
            "written to between steps with ZeRO-3, which holds them in partitions: nothing was changed",
            "write within deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)",
        )
