"""Functions around DeepSpeed's private names. DeepSpeed is imported when a function needs it."""

import os
import weakref
from collections.abc import Callable, Container, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lightning_mp.compat import patched


def restore_linear() -> None:
    """Put torch's ``functional.linear`` back: stage 3 replaces it for the whole process."""
    if functional.linear.__module__ == "deepspeed.runtime.zero.linear":
        functional.linear = cast("Any", torch)._C._nn.linear


#: the last ZeRO optimizer that put hooks into a module, by module. The hooks keep it alive.
_former: weakref.WeakKeyDictionary[nn.Module, Callable[[], Any]] = weakref.WeakKeyDictionary()


def initialize(module: nn.Module, **given: Any) -> tuple[Any, Any]:
    """Return the engine and the optimizer of ``deepspeed.initialize``. No parameter is cast.

    The hooks that an earlier run left on ``module`` are removed first. ``given`` are the other
    arguments of ``deepspeed.initialize``.
    """
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine

    before = _former.pop(module, lambda: None)()
    if before is not None:
        before.destroy()
    no_cast = patched(DeepSpeedEngine, _cast_module_mixed_precision=lambda *_args, **_kwargs: None)
    with no_cast:
        engine, optimizer, _, _ = cast("Any", deepspeed).initialize(model=module, dist_init_required=False, **given)
    if hasattr(engine.optimizer, "destroy"):
        _former[module] = weakref.ref(engine.optimizer)
    return engine, optimizer


def partitions(optimizer: Any) -> list[tuple[Sequence[Tensor], Tensor]]:
    """Return pairs of parameters and the flat partition that a ZeRO optimizer steps for them.

    The list is empty for any other optimizer.
    """
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        return list(zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True))
    flats = getattr(optimizer, "single_partition_of_fp32_groups", ())  # stages 1 and 2
    return list(zip(optimizer.bit16_groups, flats, strict=True)) if flats else []


def _rule_of(engine: Any) -> Any:
    return getattr(engine.optimizer, "loss_scaler", None) or getattr(engine.optimizer, "loss_scale_config", None)


def scale_of(engine: Any) -> float | None:
    """Return the loss scale of a stock ``DeepSpeedEngine``.

    ``None`` if fp16 is off, because nothing is scaled.
    """
    scale = getattr(_rule_of(engine), "cur_scale", None)
    return None if scale is None or not engine.fp16_enabled() else float(scale)


def floor_of(engine: Any) -> float:
    """Return the lowest loss scale of a stock ``DeepSpeedEngine``. 0 if it has none."""
    rule = _rule_of(engine)
    return float(getattr(rule, "min_scale", None) or getattr(rule, "min_loss_scale", None) or 0.0)


def model_states_file(engine: Any, folder: str) -> str:
    """Return the path of the file in a checkpoint's ``folder`` from which this rank loads the module's states."""
    return engine._get_ckpt_name(*os.path.split(folder))


class Zero:
    """The parts of a ``DeepSpeedEngine`` and its ZeRO optimizer that a plan's step needs."""

    def __init__(self, engine: Any, optimizer: Any) -> None:
        self.engine, self.optimizer = engine, optimizer
        self._scale: PlanScale | None = None
        #: ``gradient_clipping`` of the JSON
        self.clip_of_json = float(optimizer.clip_grad)
        #: True if master weights and optimizer state of ZeRO-1 or 2 are on the CPU
        self.offloads = bool(getattr(optimizer, "cpu_offload", False))
        #: True if each pass is reduced, and added to earlier passes of the window whichever
        #: parameters it reached. ZeRO-1 reduces the last pass only. ZeRO-3 adds to gradients of an
        #: earlier window. Offload does both.
        self.sums_every_pass = bool(getattr(optimizer, "partition_gradients", False)) and not self.offloads

    def install_scale(self, scaler: Any, clip: float) -> None:
        """Replace the loss scale and the clip norm of DeepSpeed, or of a checkpoint that it loaded.

        Args:
            scaler: the plan's scaler. ``None`` leaves DeepSpeed's scale as it is.
            clip: the norm to clip by, 0 for no clipping.
        """
        zero = self.optimizer
        if scaler is not None:
            self._scale = zero.loss_scaler = PlanScale(scaler)
        if zero.dtype == torch.bfloat16 or not getattr(zero, "compute_grad_norm", True):
            zero.check_grad_overflow = True  # otherwise DeepSpeed does not check for overflow
        zero.clip_grad = clip

    def watched(self, check: Callable[[], None], step: Callable[..., None]) -> AbstractContextManager[None]:
        """Return a context that calls ``check`` before each bucket of gradients is reduced.

        In it the optimizer's ``step(*args)`` calls ``step(own_step, *args)``.
        """
        stage_3 = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"
        name = stage_3 if hasattr(self.optimizer, stage_3) else "reduce_ipg_grads"
        reduce = getattr(self.optimizer, name)

        def checked(*args: Any, **kwargs: Any) -> None:
            check()
            reduce(*args, **kwargs)

        return patched(self.optimizer, **{name: checked, "step": partial(step, self.optimizer.step)})

    def forget_gradients(self) -> None:
        """Drop the averaged gradients of a ZeRO-1 or 2 optimizer.

        Zeroing gradients would leave them. A new accumulation window then begins. Under ZeRO-3
        nothing happens.
        """
        zero = self.optimizer
        if hasattr(zero, "all_grad_tensors"):
            zero.averaged_gradients.clear()  # in place: parameters refer to this object
            zero.all_grad_tensors.clear()
            zero.micro_step_id = -1

    def assigned_weights(self) -> list[tuple[Tensor, Tensor]]:
        """Return pairs for weights of ZeRO-1 or 2 whose ``data`` a user replaced.

        ``weight.data = ...`` takes a weight out of the flat buffers.
        A pair is the weight and its part of the buffer, which holds the values from before.
        """
        zero = self.optimizer
        pairs: list[tuple[Tensor, Tensor]] = []
        for group, flat in enumerate(getattr(zero, "bit16_groups_flat", ())):
            weights, shapes = zero.round_robin_bit16_groups[group], zero.round_robin_bit16_meta[group]
            for weight, meta, offset in zip(weights, shapes, zero.round_robin_bit16_offsets[group], strict=True):
                place = flat.data_ptr() + offset * flat.itemsize
                if meta.numel() and (weight.data_ptr() != place or weight.shape != meta.shape):
                    pairs.append((weight, flat.narrow(0, offset, meta.numel()).view(meta.shape)))
        return pairs

    def bits(self) -> Tensor:
        """Return a sum over the bits of this rank's fp32 weights of ZeRO-1 or 2, by param group.

        A write to a weight changes it, except if changes cancel in the sum.
        """
        zero = self.optimizer
        ranks = map(dist.get_rank, zero.real_dp_process_group)
        parts = [parts[rank] for parts, rank in zip(zero.parallel_partitioned_bit16_groups, ranks, strict=True)]
        return torch.stack([part.view(torch.int32).sum() for part in parts])

    def step(self) -> tuple[bool, Any]:
        """Run DeepSpeed's step.

        Return whether it was applied, and the gradient norm or ``None``.
        """
        scale = self._scale
        # one device sync for a step, because ZeRO reads the scale several times for each param
        # group
        with nullcontext() if scale is None else patched(scale, known=scale.cur_scale):
            self.engine.step()
        return self.engine.was_step_applied(), self.engine.get_global_grad_norm()


class PlanScale:
    """The loss scaler of a ZeRO optimizer under a plan, with the scale of the backward pass.

    DeepSpeed's own scaler adjusts the scale before gradients are unscaled. Pickled, it is
    DeepSpeed's own class.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler, self.dynamic = scaler, scaler.config.dynamic
        #: the scale, within a step
        self.known: float | None = None

    @property
    def cur_scale(self) -> float:
        return self._scaler.get_scale() if self.known is None else self.known

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        """Do nothing: the plan adjusts the scale."""

    loss_scale = cur_scale

    def scale_loss(self, loss: Any) -> Any:
        return loss  # the plan has scaled it

    def update_scale(self, overflow: bool) -> None:
        """Do nothing: the plan adjusts the scale after the step."""

    def __reduce__(self) -> Any:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

        rule = self._scaler.config
        if not rule.dynamic:
            return LossScaler, (self.cur_scale,)
        rest = rule.growth_interval, rule.min_scale, rule.hysteresis, rule.consecutive_hysteresis
        return DynamicLossScaler, (self.cur_scale, *rest, rule.at_min == "raise")


def halve_masters(zero: Any, dtypes: tuple[Any, ...]) -> None:
    """Cast master weights of a ZeRO-1 or 2 optimizer to the dtype of their weights.

    Groups whose weights are in none of ``dtypes`` keep their masters.
    """
    groups = zip(zero.bit16_groups_flat, zero.single_partition_of_fp32_groups, strict=True)
    halves = [(flat, master) for flat, master in groups if flat.dtype in dtypes]
    for flat, master in halves:
        master.data = master.data.to(flat.dtype)
    if halves:
        zero._link_all_hp_params()  # parameters hold views of their masters


class HalfGroups:
    """Param groups of a ZeRO-1 or 2 optimizer with weights in ``dtype`` and fp32 master weights.

    Gradients stay fp32. If a user writes to a weight, its master takes the value. Other masters
    keep all their bits.

    Args:
        zero: the ZeRO optimizer.
        weights: ``id`` of the weights. A group belongs to it if its first weight does.
        dtype: the half dtype.
    """

    def __init__(self, zero: Any, weights: Container[int], dtype: torch.dtype) -> None:
        self._zero, self._dtype = zero, dtype
        self._places = [place for place, group in enumerate(zero.bit16_groups) if id(group[0]) in weights]
        for weight in (weight for place in self._places for weight in zero.bit16_groups[place]):
            weight.grad_dtype = torch.float32
            if weight._hp_mapping is not None:
                weight._hp_mapping.lp_fragment = None  # this view would keep the fp32 values alive
        zero._restore_from_bit16_weights = self._refresh_masters
        self._hold(dtype)

    def _refresh_masters(self) -> None:
        """Copy each number of a weight into its master, unless it equals the rounded master."""
        zero = self._zero
        for place, master in enumerate(zero.single_partition_of_fp32_groups):
            part = zero.parallel_partitioned_bit16_groups[place][dist.get_rank(zero.real_dp_process_group[place])]
            written = part != master.to(part.dtype)
            master.data.copy_(torch.where(written, part.to(master.dtype), master))

    def _hold(self, dtype: torch.dtype) -> None:
        zero = self._zero
        for place in self._places:
            flat = zero.bit16_groups_flat[place] = zero.bit16_groups_flat[place].to(dtype)
            zero.parallel_partitioned_bit16_groups[place] = zero.get_data_parallel_partitions(flat, place)
            zero._update_model_bit16_weights(place)

    @contextmanager
    def fp32(self) -> Generator[None, None, None]:
        """Within the context, the weights are fp32 and hold their gathered master weights.

        A collective.
        """
        self.release()
        try:
            yield
        finally:
            self._hold(self._dtype)

    def release(self, *, gather: bool = True) -> None:
        """Make the weights fp32.

        With ``gather`` they hold the master weights, and it is a collective.
        Without ``gather`` they keep the rounded values.
        """
        if gather:
            self._zero.refresh_fp32_params()
        self._hold(torch.float32)
        if gather:
            self._zero.update_lp_params()


# ------------------------------------------------------------------ partitioned parameters


def is_partitioned(parameter: object) -> bool:
    """True if ZeRO-3 has partitioned the parameter over the ranks."""
    return hasattr(parameter, "ds_tensor")


def numbers_of_split(parameter: Any) -> int:
    """Return the size of the whole parameter if ZeRO-3 has partitioned it, else 0."""
    return parameter.ds_numel if is_partitioned(parameter) else 0


def gather_as(parameter: Any, dtype: torch.dtype | None) -> bool:
    """Have modules gather a partitioned parameter in ``dtype``. True if they do.

    ``None`` is the parameter's own dtype, and returns False. Parameters that stay gathered, and
    vectors, keep their own dtype too. DeepSpeed's linear adds a bias in fp32, outside of autocast's
    product.
    """
    if hasattr(parameter, "comm_dtype"):
        del parameter.comm_dtype
    if dtype is None or not is_partitioned(parameter) or parameter.ds_persist or len(parameter.ds_shape) < 2:
        return False
    parameter.comm_dtype = dtype
    return True


def reduce_as_stored(zero: Any) -> None:
    """Have a ZeRO-3 optimizer reduce gradients in the dtype that it has without ``gather_as``.

    If it has buckets of several dtypes, nothing changes.
    """
    if len(getattr(zero, "ipg_buckets", ())) == 1:
        (only,) = zero.ipg_buckets
        zero.get_param_comm_dtype = lambda _parameter: only


def cast_partition(parameter: Any) -> None:
    """Cast the rank's partition to the parameter's dtype.

    A cast of a module changes the empty parameter only.
    """
    part = getattr(parameter, "ds_tensor", None)
    if part is not None and part.dtype != parameter.dtype:
        part.data = part.data.to(parameter.dtype)


def gathers(module: Any) -> bool:
    """True if ZeRO-3 has to gather a parameter of ``module`` when it runs, children not counted."""
    return any(is_partitioned(parameter) and not parameter.numel() for parameter in module.parameters(recurse=False))


def gathered_changes_told(parameter: Any, tell: Callable[[], None]) -> AbstractContextManager[None]:
    """Return a context that calls ``tell`` after a ``GatheredParameters`` changed its parameters.

    It holds for a ``GatheredParameters`` whose first parameter is ``parameter``.
    """
    own = parameter.partition

    def partition(param_list: Any = None, *rest: Any, has_been_updated: bool = False, **options: Any) -> None:
        own(param_list, *rest, has_been_updated=has_been_updated, **options)
        if has_been_updated:
            tell()

    return patched(parameter, partition=partition)


def gathered_to_write(module: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which partitioned parameters are whole, and rank 0's writes are kept.

    A collective: every rank enters it. Parameters that the program has gathered already are left
    out, because DeepSpeed gathers none twice.
    """
    from deepspeed.runtime.zero import GatheredParameters, partition_parameters

    depth = partition_parameters.DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR
    split = [parameter for parameter in module.parameters() if is_partitioned(parameter)]
    return GatheredParameters([one for one in split if not getattr(one, depth, 0)], modifier_rank=0)


def gathers_counted(count: Callable[[int], None]) -> AbstractContextManager[None]:
    """Return a context that counts open ``GatheredParameters``.

    ``count(1)`` is called after one begins, ``count(-1)`` after one ends.
    """
    from deepspeed.runtime.zero import GatheredParameters

    kind: Any = GatheredParameters
    begin, end = kind.__enter__, kind.__exit__

    def enter(context: Any) -> Any:
        result = begin(context)
        count(1)
        return result

    def leave(context: Any, *error: Any) -> Any:
        try:
            return end(context, *error)
        finally:
            count(-1)

    return patched(kind, __enter__=enter, __exit__=leave)


def local_part(parameter: Any) -> Tensor:
    """Return the rank's part of a partitioned parameter, flat and without padding."""
    return _unpadded(parameter, parameter.ds_tensor)


def local_gradient(parameter: Any) -> Tensor | None:
    """Return the rank's part of a gradient, flat and times the loss scale, before ZeRO's step.

    It is empty if the whole parameter belongs to other ranks. ``None`` if there is no gradient
    under ZeRO-3, or ZeRO does not have the parameter.

    Raises:
        ValueError: ZeRO-1 or 2 holds no gradients, because no backward pass came after its step.
    """
    if is_partitioned(parameter):
        gradient = parameter._z3_optimizer.get_local_fp32_grad_for_param(parameter)
        return None if gradient is None else _unpadded(parameter, gradient)
    if not hasattr(parameter, "_hp_mapping"):
        return None
    fragment = parameter._hp_mapping
    if fragment is None:  # the whole parameter belongs to other ranks
        return parameter.new_empty(0)
    gradient = fragment.get_lp_grad_fragment(parameter._index_in_param_group).detach().reshape(-1)
    place = fragment.lp_fragment_address
    return gradient.narrow(0, place.start, place.numel) if gradient.numel() == parameter.numel() else gradient


def _unpadded(parameter: Any, part: Tensor) -> Tensor:
    """Return ``part`` flat and without padding.

    ZeRO-3 pads the last parts, because all have the same size.
    """
    flat = part.detach().reshape(-1)
    rank = dist.get_rank(parameter.ds_process_group)
    return flat[: max(0, parameter.ds_numel - rank * flat.numel())]
