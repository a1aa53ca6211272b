"""DeepSpeed's private names, each behind a function that says what it is for; it is imported where it is used."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


@contextmanager
def casts_left_out() -> Generator[None, None, None]:
    """Within, no engine casts the parameters of its module, which it does where ``fp16.enabled`` is true."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    engine_class = cast("Any", DeepSpeedEngine)
    cast_all = engine_class._cast_module_mixed_precision
    engine_class._cast_module_mixed_precision = lambda *_args, **_kwargs: None
    try:
        yield
    finally:
        engine_class._cast_module_mixed_precision = cast_all


def before_reduction(zero: Any, check: Callable[[], None]) -> None:
    """Have ``check`` run at each backward's end, before a ZeRO optimizer sums what it has not summed yet."""
    reduce = zero.overlapping_partition_gradients_reduce_epilogue

    def checked() -> None:
        check()
        reduce()

    zero.overlapping_partition_gradients_reduce_epilogue = checked


def halve_masters(zero: Any, dtypes: tuple[Any, ...], except_of: type[Tensor]) -> None:
    """Let a ZeRO-1 or 2 optimizer keep no fp32 copy of weights in one of ``dtypes`` that are none of ``except_of``."""
    changed = False
    for group, flat, master in _groups(zero, zero.bit16_groups_flat):
        if flat.dtype in dtypes and not isinstance(next(iter(group), None), except_of):
            master.data = master.data.to(flat.dtype)
            changed = True
    if changed:
        zero._link_all_hp_params()  # parameters hold views of their masters


def refresh_masters(zero: Any, except_of: type[Tensor]) -> None:
    """Have a ZeRO optimizer's masters follow the weights; those of ``except_of`` in stage 1 and 2 stay."""
    if not hasattr(zero, "parallel_partitioned_bit16_groups"):
        zero.refresh_fp32_params()
        return
    partitions = zip(zero.parallel_partitioned_bit16_groups, zero.real_dp_process_group, strict=True)
    own = [parts[dist.get_rank(group)] for parts, group in partitions]
    for group, part, master in _groups(zero, own):
        if not isinstance(next(iter(group), None), except_of):
            master.data.copy_(part.data)


def _groups(zero: Any, flats: Iterable[Tensor]) -> Iterator[tuple[list[Tensor], Tensor, Tensor]]:
    """Of each group of a ZeRO-1 or 2 optimizer: its parameters, its entry of ``flats``, this rank's masters."""
    return zip(zero.bit16_groups, flats, zero.single_partition_of_fp32_groups, strict=True)


def set_master(parameter: Any, value: Tensor) -> None:
    """Set this rank's part of the fp32 master of a parameter to that of a whole ``value``."""
    import deepspeed

    deepspeed.utils.safe_set_full_fp32_param(parameter, value)


def full_master(parameter: Any, group: Any = None) -> Tensor:
    """The whole fp32 master of a parameter of a ZeRO-1 or 2 optimizer, on the CPU; every rank calls it.

    ``group`` is one of all ranks that sums on the CPU, where ZeRO's own is not to be used.
    """
    whole = torch.zeros(parameter.numel(), device=parameter.device if group is None else "cpu")
    fragment = parameter._hp_mapping
    if fragment is not None:
        place = fragment.lp_fragment_address
        whole.narrow(0, place.start, place.numel).copy_(fragment.get_hp_fragment().detach().reshape(-1))
    dist.all_reduce(whole, group=parameter._dp_group if group is None else group)
    return whole.cpu().view(parameter.shape)


def master_part(parameter: Any) -> Tensor:
    """This rank's part of the master of a parameter of a ZeRO-1 or 2 optimizer, flat."""
    fragment = parameter._hp_mapping
    return torch.empty(0) if fragment is None else fragment.get_hp_fragment().detach().reshape(-1)


def loses_averages(zero: Any, parameter: Tensor) -> bool:
    """Whether a ZeRO-1 or 2 optimizer would average a gradient of ``parameter`` in the gradient's own dtype."""
    return not zero.contiguous_gradients or parameter.numel() > zero.reduce_bucket_size


def accumulate_apart(zero: Any, on: bool) -> None:
    """Have a ZeRO-1 optimizer add up gradients of several backward passes in fp32, not in the weight's dtype."""
    zero.use_grad_accum_attribute = on


def partition_sums(zero: Any) -> Tensor:
    """Of each group of a ZeRO-1 or 2 optimizer, the sum of the bits of the weights that this rank steps."""
    groups = zip(zero.parallel_partitioned_bit16_groups, zero.real_dp_process_group, strict=True)
    parts: list[Tensor] = [partitions[dist.get_rank(group)].detach() for partitions, group in groups]
    return torch.stack([part.view(_BITS[part.element_size()]).sum(dtype=torch.int64) for part in parts])


#: an integer of as many bytes
_BITS = {2: torch.int16, 4: torch.int32}


# ------------------------------------------------------------------ what this rank has of a parameter


def is_partitioned(parameter: object) -> bool:
    """Whether ZeRO-3 has split the parameter over the ranks."""
    return hasattr(parameter, "ds_tensor")


def gather_as(parameter: Any, dtype: torch.dtype | None) -> bool:
    """Have modules gather a partitioned parameter in ``dtype``, or in its own (``None``); whether they do.

    What was gathered is fp32 again where it is used. Biases stay as they are: DeepSpeed's own linear adds them in fp32,
    outside of autocast's product. Users' own ``GatheredParameters``, checkpoints and what ZeRO keeps
    whole get what is stored.
    """
    if hasattr(parameter, "comm_dtype"):
        del parameter.comm_dtype
    halves = (
        dtype is not None and is_partitioned(parameter) and not parameter.ds_persist and len(parameter.ds_shape) > 1
    )
    if halves:
        parameter.comm_dtype = dtype
    return halves


def reduce_as_stored(zero: Any) -> None:
    """Have a ZeRO-3 optimizer reduce gradients in the dtype it would without ``gather_as``.

    It reads the same attribute where anything in the process has run DeepSpeed's own ``torch_autocast``.
    """
    if len(zero.ipg_buckets) == 1:
        (only,) = zero.ipg_buckets
        zero.get_param_comm_dtype = lambda _parameter: only


def cast_partition(parameter: Any) -> None:
    """Give the rank's part the dtype of the parameter, whose empty shell alone a cast has changed."""
    part = getattr(parameter, "ds_tensor", None)
    if part is not None and part.dtype != parameter.dtype:
        part.data = part.data.to(parameter.dtype)


def stays_gathered(parameter: Any) -> bool:
    """Whether ZeRO-3 holds the parameter whole at all times, for it is small."""
    return bool(parameter.ds_persist)


def gathers(module: Any) -> bool:
    """Whether ZeRO-3 has to gather a parameter of ``module`` itself when it runs."""
    return any(is_partitioned(one) and not one.numel() for one in module.parameters(recurse=False))


def after_gathered_change(parameter: Any, call: Callable[[], None]) -> None:
    """Have ``call`` run after a user's ``GatheredParameters`` that begin with this one and change them."""
    own = parameter.partition

    def partition(param_list: Any = None, *rest: Any, has_been_updated: bool = False, **options: Any) -> None:
        own(param_list, *rest, has_been_updated=has_been_updated, **options)
        if has_been_updated:
            call()

    parameter.partition = partition


def local_part(parameter: Any) -> Tensor:
    """The rank's part of a partitioned parameter, flat and without padding."""
    return _unpadded(parameter, parameter.ds_tensor)


def local_gradient(parameter: Any) -> Tensor | None:
    """The rank's part of a gradient between the backward pass and ZeRO's step, times the loss scale; flat.

    ``None`` where there is none, or where ZeRO does not have the parameter.
    """
    if is_partitioned(parameter):
        gradient = parameter._z3_optimizer.get_local_fp32_grad_for_param(parameter)
        return None if gradient is None else _unpadded(parameter, gradient)
    if not hasattr(parameter, "_hp_mapping"):
        return None
    fragment = parameter._hp_mapping
    if fragment is None:  # all of it lies on other ranks
        return parameter.new_empty(0)
    gradient = fragment.get_lp_grad_fragment(parameter._index_in_param_group).detach().reshape(-1)
    place = fragment.lp_fragment_address
    return gradient.narrow(0, place.start, place.numel) if gradient.numel() == parameter.numel() else gradient


def _unpadded(parameter: Any, part: Tensor) -> Tensor:
    """ZeRO-3 splits a parameter into equal parts, of which the last ones have nothing behind its end."""
    flat = part.detach().reshape(-1)
    rank = dist.get_rank(parameter.ds_process_group)
    return flat[: max(0, parameter.ds_numel - rank * flat.numel())]
