"""FSDP1's wrappers in a module tree: what may become one flat parameter, and the module as its user wrote it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.optim import Optimizer

from lightning_mp.compat.torch_sharding import flat_members, run_wrap_policy
from lightning_mp.errors import Fault, Faults, PlanError
from lightning_mp.modules.patterns import plain_name
from lightning_mp.numerics.dtypes import to_torch
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.strategies.meta_device import initialise
from lightning_mp.strategies.shard_units import Stored, Units

#: where the wrapper of a module is kept for its next run: beside its submodules, not among them
_ROOT = "_lmp_fsdp1_root"


def keep_root(module: nn.Module, root: FullyShardedDataParallel) -> None:
    """Remember the wrapper of ``module``: without it the flat parameters could not be gathered again."""
    vars(module)[_ROOT] = root


def root_of(module: nn.Module) -> FullyShardedDataParallel | None:
    """The wrapper that an earlier run, or stage, put around ``module``."""
    return vars(module).get(_ROOT)


@contextmanager
def unwrapped(module: nn.Module) -> Generator[None, None, None]:
    """Take the wrappers out of the tree meanwhile, so that names and classes are those that the user wrote."""
    taken = [
        (parent, name, child)
        for parent in list(module.modules())
        if not isinstance(parent, FullyShardedDataParallel)
        for name, child in parent.named_children()
        if isinstance(child, FullyShardedDataParallel)
    ]
    for parent, name, child in taken:
        setattr(parent, name, child.module)
    try:
        yield
    finally:
        for parent, name, child in taken:
            setattr(parent, name, child)


@contextmanager
def full_shapes(root: FullyShardedDataParallel) -> Generator[Callable[[Iterable[Optimizer]], None], None, None]:
    """Give every parameter its full shape meanwhile, without memory for it, for users who group by ``dim()``.

    Call what it yields with the optimizers made meanwhile: state that they made at once is cut to the shards' shapes.
    """
    shards: dict[int, Tensor] = {}
    shown: list[tuple[Tensor, Tensor]] = []
    for parameter, shape in _flat_members(root):
        shards[id(parameter)] = parameter.data
        shown.append((parameter, parameter.data))
        parameter.data = parameter.data.new_zeros(()).expand(shape)
    try:
        yield lambda optimizers: _shard_state(optimizers, shards)
    finally:
        for parameter, shard in shown:
            parameter.data = shard


def _flat_members(root: FullyShardedDataParallel) -> Iterator[tuple[Tensor, torch.Size]]:
    for unit in FullyShardedDataParallel.fsdp_modules(root):
        yield from flat_members(unit)


def _shard_state(optimizers: Iterable[Optimizer], shards: Mapping[int, Tensor]) -> None:
    faults = Faults("strategy")
    for optimizer in optimizers:
        for parameter, state in list(optimizer.state.items()):
            shard = shards.get(id(parameter))
            for key, value in list(state.items()) if shard is not None else ():
                if not isinstance(value, Tensor) or value.shape != parameter.shape or value.dim() == 0:
                    continue
                assert shard is not None
                first = value.flatten()[:1]
                if not bool((value == first).all()):
                    faults.add(
                        f"{type(optimizer).__name__}, which makes {key!r} of different numbers when it is built",
                        "optimizers whose first state is one number everywhere, since each rank holds a shard",
                        "use AdamW or SGD, or strategy='mp_fsdp2'",
                    )
                state[key] = first.new_empty(shard.shape).copy_(first.expand(shard.shape))
    faults.raise_if_any()


# ------------------------------------------------------------------ what becomes a unit


def chosen_by(policy: Any, root: nn.Module, faults: Faults) -> list[nn.Module]:
    """The modules below ``root`` that a policy of ``torch.distributed.fsdp.wrap`` makes units."""
    chosen = run_wrap_policy(policy, root)
    if chosen is None:
        return _chosen_by_size(policy, root)
    if any(chosen.values()):
        faults.add(
            f"auto_wrap_policy={type(policy).__name__} with keywords for single modules",
            "a policy that says which modules are units, and True for each of them",
            "return True from it; the plan says what differs between modules",
        )
    return [module for module in chosen if module is not root]


def _chosen_by_size(policy: Callable[..., bool], root: nn.Module) -> list[nn.Module]:
    """As ``FullyShardedDataParallel`` calls a function for a policy: children first, with the numbers left over."""
    chosen: list[nn.Module] = []

    def wrapped(module: nn.Module) -> int:
        count = sum(parameter.numel() for parameter in module.parameters())
        if not policy(module=module, recurse=True, nonwrapped_numel=count):
            return 0
        inside = sum(wrapped(child) for child in module.children())
        if module is not root and policy(module=module, recurse=False, nonwrapped_numel=count - inside):
            chosen.append(module)
            return count
        return inside

    wrapped(root)
    return chosen


def ignored(root: nn.Module, options: Mapping[str, Any], faults: Faults) -> set[int]:
    """``id`` of the parameters that FSDP's keywords leave out; trainable ones would differ between ranks."""
    given = [item for key, value in options.items() if key.startswith("ignored_") for item in value or ()]
    left_out = [item for item in given if isinstance(item, Tensor)]
    left_out += [p for item in given if isinstance(item, nn.Module) for p in item.parameters()]
    ids = set(map(id, left_out))
    for name, parameter in root.named_parameters():
        if id(parameter) in ids and parameter.requires_grad:
            faults.add(
                f"ignored_states= with {name!r}, which is trained",
                "frozen parameters there: the gradients of others would not be reduced over ranks",
                "freeze it, or take it out of ignored_states",
            )
    return ids


def check_flat(module: nn.Module, cut: Units, stored: Stored, left_out: set[int], faults: Faults) -> None:
    """A flat parameter has one dtype, which its frozen parameters share; ``units`` notes what trainable ones break."""
    chosen = set(map(id, cut.inner))
    for unit in (*cut.inner, module):
        own = [(name, parameter) for name, parameter in _own(unit, chosen) if id(parameter) not in left_out]
        for name, parameter in own:
            if not parameter.is_floating_point():
                faults.add(
                    f"parameter {name!r} in {short(parameter.dtype)}",
                    "floating parameters, since FSDP1 makes one flat parameter of each unit",
                    "keep it in a buffer, pass it in ignored_states=, or use strategy='mp_fsdp2'",
                )
        floating = [(name, parameter) for name, parameter in own if parameter.is_floating_point()]
        trainable = {stored(parameter): name for name, parameter in floating if parameter.requires_grad}
        dtypes = {**{stored(parameter): name for name, parameter in floating}, **trainable}
        if len(dtypes) > 1 and len(trainable) < 2:
            given = " and ".join(f"{name} in {short(dtype)}" for dtype, name in dtypes.items())
            faults.add(
                f"frozen parameters of another dtype in one unit: {given}",
                "one dtype among all parameters of an FSDP1 unit, the frozen ones included",
                "pin a module that is called, pin them alike, or use strategy='mp_fsdp2'",
            )


def _own(unit: nn.Module, chosen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """The parameters that fall to ``unit`` and to no unit inside it."""
    waiting: list[tuple[str, nn.Module]] = [("", unit)]
    while waiting:
        prefix, module = waiting.pop()
        for key, parameter in module.named_parameters(recurse=False):
            yield prefix + key, parameter
        waiting += [(f"{prefix}{key}.", child) for key, child in module.named_children() if id(child) not in chosen]


def check_again(
    root: FullyShardedDataParallel,
    module: nn.Module,
    policy: PrecisionPolicy,
    sharding: ShardingStrategy,
    stored: Stored,
    faults: Faults,
) -> None:
    """A module that an earlier run wrapped stays as it was sharded and stored: another plan has to ask for the same."""
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != stored(parameter):
            faults.add(
                f"a module that an earlier run sharded with {name!r} in {short(parameter.dtype)}, where this plan "
                f"stores {short(stored(parameter))}",
                "the storage of the earlier run",
                "make a new module, or keep the plan",
            )
            break
    if dist.get_world_size() > 1 and root.sharding_strategy is not sharding:
        faults.add(
            f"sharding_strategy={sharding.name} for a module that an earlier run wrapped with {root.sharding_strategy}",
            "the sharding of the earlier run",
            "make a new module, or keep the strategy",
        )
    before = cast("Any", root).mixed_precision.reduce_dtype
    if before != to_torch(policy.reduce_dtype):
        faults.add(
            f"reduce_dtype={policy.reduce_dtype!r} for a module that an earlier run wrapped with {short(before)!r}",
            "the reduce_dtype of the earlier run",
            "make a new module, or keep the plan",
        )


def materialise(module: nn.Module, *, root: nn.Module, device: torch.device) -> None:
    """Make and initialise what ``module`` itself has on the meta device, as rank 0 does."""
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    if not any(tensor.is_meta for tensor in own):
        return
    module.to_empty(device=device, recurse=False)
    initialise(module, root)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        dist.broadcast(tensor.detach(), src=0)


def short(dtype: Any) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------ optimizer states


def by_position(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state under parameters' names as plain optimizers have it: by the place of each parameter in its groups."""
    groups: Sequence[dict[str, Any]] = state["param_groups"]
    places = {name: place for place, name in enumerate(name for group in groups for name in group["params"])}
    return {
        "state": {places[name]: values for name, values in state["state"].items()},
        "param_groups": [{**group, "params": [places[name] for name in group["params"]]} for group in groups],
    }


def by_name(state: Mapping[str, Any], optimizer: Optimizer, root: FullyShardedDataParallel) -> dict[str, Any]:
    """The other way round: places in a plain optimizer's groups are those in ``optimizer``'s, whatever their numbers.

    Lightning takes the numbers for places in the *model*, which they are not where an optimizer has several groups.

    Raises:
        PlanError: the groups are of other sizes than those that were saved.
    """
    names = {id(parameter): plain_name(name) for name, parameter in root.named_parameters()}
    groups: Sequence[dict[str, Any]] = state["param_groups"]
    here = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    _check_sizes([len(group["params"]) for group in groups], [len(group) for group in here])
    numbers = [number for group in groups for number in group["params"]]
    name_of = dict(zip(numbers, (name for group in here for name in group), strict=True))
    return {
        "state": {name_of[number]: values for number, values in state["state"].items()},
        "param_groups": [{**group, "params": members} for group, members in zip(groups, here, strict=True)],
    }


def _check_sizes(saved: list[int], here: list[int]) -> None:
    if saved == here:
        return
    fault = Fault(
        f"an optimizer whose groups hold {here} parameters, for a state saved with {saved}",
        "the groups of the saved run",
        "configure the optimizer as it was, or take 'optimizer_states' out of the checkpoint",
    )
    raise PlanError([fault], "checkpoint")


def loads_by_shard(path: Path, optimizers: int) -> bool:
    """Whether a folder of shards has FSDP1's layout (FSDP2 calls the weights otherwise), and a state an optimizer.

    Lightning cannot load an optimizer that keeps no state, or kept none yet.
    """
    names = list(FileSystemReader(path).read_metadata().state_dict_metadata)
    wanted = ("model.", *(f"optimizer_{index}.state." for index in range(optimizers)))
    return all(any(name.startswith(prefix) for name in names) for prefix in wanted)
