"""How a prepared model becomes shards: its units, the same weights on every rank, tensors on the meta device made."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_mp.compat.torch import own_reset, saved_buffers
from lightning_mp.compat.torch_sharding import make_root
from lightning_mp.compat.transformers import IS_INITIALIZED, block_classes, initialiser
from lightning_mp.errors import Faults
from lightning_mp.modules.patterns import (
    called_in,
    has_own_forward,
    matches,
    named_submodules,
    no_match,
    original_class,
)
from lightning_mp.modules.pins import PinMap
from lightning_mp.numerics.dtypes import TORCH_DTYPES, to_torch

#: what makes a module a unit where nothing else says so: torch.distributed.fsdp.wrap.size_based_auto_wrap_policy's
SIZE_OF_A_UNIT = 100_000_000

#: tells the dtype a parameter will be stored in
Stored = Callable[[Tensor], torch.dtype]
Wrap = str | type[nn.Module] | Sequence[str | type[nn.Module]] | None


def units(
    root: nn.Module, wrap: Wrap, pin_map: PinMap, stored: Stored, faults: Faults, *, together: str | None = None
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Cut ``root`` into shard units without changing anything; the root takes what no other unit has.

    ``root`` may be a part of what ``pin_map`` was made for. Noted are patterns of ``wrap`` without a match, and units
    that would hold two dtypes. What is pinned to the dtype ``together`` stays in the unit around it. Returns repeated
    blocks, in forward order, which is what is compiled; and blocks and pinned modules, inner ones first.
    """
    blocks = _blocks(root, wrap, faults)
    apart = [member.module for member in pin_map.members if member.entry and member.pin.dtype != together]
    apart += [declared.module for declared in pin_map.declared if isinstance(declared.tensor, nn.Parameter)]
    inside = {*root.modules()}
    # A unit is gathered when it is called, and code may iterate over a Sequential without calling it.
    called = dict.fromkeys(one for part in apart if part in inside for one in called_in(part, through_sequential=True))
    # an attention reads its children's weights without calling them, so that no hook of theirs would gather
    attentions = [module for module in root.modules() if isinstance(module, nn.MultiheadAttention)]
    read = {child for attention in attentions for child in attention.children()}
    pinned = [module for module in called if _can_be_unit(module) and module not in read]
    chosen = _keep_ties_together(root, blocks if wrap is not None else (), (*blocks, *pinned), faults)
    depth = {module: name.count(".") for name, module in named_submodules(root)}
    inner = sorted(chosen, key=lambda module: -depth[module])
    _check_dtypes(root, inner, stored, faults)
    return [block for block in blocks if block in chosen], inner


# ------------------------------------------------------------------ candidates


def _blocks(root: nn.Module, wrap: Wrap, faults: Faults) -> list[nn.Module]:
    """The modules to wrap, in definition order, which usually is the order they run in."""
    if wrap is None:  # what transformers models name themselves
        present = {original_class(module).__name__ for module in root.modules()}
        given: Sequence[Any] = [n for m in root.modules() for n in block_classes(m) if n in present]
    else:
        given = [wrap] if isinstance(wrap, (str, type)) else list(wrap)
    chosen = set[nn.Module]() if given else _by_size(root)
    for item in dict.fromkeys(given):
        matched = _matching(root, item)
        if not matched and wrap is not None:
            no_match(item if isinstance(item, str) else item.__name__, root, "wrap=", faults)
        chosen |= matched
    return [module for module in root.modules() if module in chosen]


def _matching(root: nn.Module, item: str | type[nn.Module]) -> set[nn.Module]:
    """What ``item`` matches; of nested matches the outermost, and what a ``ModuleList`` or a ``Sequential`` holds."""
    matched, covered = set[nn.Module](), list[str]()
    for name, module in named_submodules(root):
        cls = original_class(module)
        means = matches(item, name, module) if isinstance(item, str) else issubclass(cls, item)
        if not means or any(name.startswith(f"{above}.") for above in covered):
            continue
        covered.append(name)
        # A unit is gathered when it is called, and code may iterate over a Sequential without calling it.
        tops = module.children() if cls is nn.Sequential else (module,)
        matched.update(filter(_can_be_unit, (called for top in tops for called in called_in(top))))
    return matched


def _by_size(root: nn.Module) -> set[nn.Module]:
    large = set[nn.Module]()

    def left_over(module: nn.Module) -> int:
        inside = sum(left_over(child) for child in module.children())
        own = inside + sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if own < SIZE_OF_A_UNIT or module is root or not has_own_forward(module):
            return own
        large.add(module)
        return 0

    left_over(root)
    return large


def _can_be_unit(module: nn.Module) -> bool:
    return has_own_forward(module) and any(True for _ in module.parameters())


# ------------------------------------------------------------------ ties and dtypes


def _held(root: nn.Module, chosen: Collection[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """The unit, the name and the value of every parameter, at each of its places."""
    owner: dict[str, nn.Module] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        owner[name] = module if module in chosen or not name else owner[name.rpartition(".")[0]]
        for key, parameter in module.named_parameters(recurse=False):
            yield owner[name], f"{name}.{key}".strip("."), parameter


def _keep_ties_together(
    root: nn.Module, asked: Sequence[nn.Module], candidates: Sequence[nn.Module], faults: Faults
) -> list[nn.Module]:
    """Candidates less those that hold a weight some other unit holds as well, unless the user asked for them.

    A tied weight is one tensor and lives in one unit: a pinned module, or a block that transformers names (BERT's
    embeddings, whose table is its head), is then no unit, and its weights fall to the unit around it (in which their
    dtype is checked).
    """
    chosen = dict.fromkeys(candidates)
    while True:
        holders: dict[int, set[nn.Module]] = {}
        for unit, _, parameter in _held(root, chosen):
            holders.setdefault(id(parameter), set()).add(unit)
        split = {unit for units in holders.values() if len(units) > 1 for unit in units} - {root}
        if split <= set(asked):
            break
        chosen = dict.fromkeys(module for module in chosen if module not in split or module in asked)
    for name, unit in named_submodules(root):
        if unit in split:
            faults.add(
                f"wrap= makes {name!r} a shard unit, which shares a weight with another unit",
                fix="wrap a module that holds all owners, or none of them",
            )
    return list(chosen)


def _check_dtypes(root: nn.Module, inner: Sequence[nn.Module], stored: Stored, faults: Faults) -> None:
    """One unit is gathered and reduced as one: its trainable parameters share a dtype."""
    names = {module: repr(name) for name, module in named_submodules(root)}
    held: dict[nn.Module, dict[torch.dtype, str]] = {}
    for unit, name, parameter in _held(root, inner):
        if parameter.requires_grad and parameter.is_floating_point():
            held.setdefault(unit, {}).setdefault(stored(parameter), name)
    for unit, dtypes in held.items():
        if len(dtypes) > 1:
            where = names.get(unit, "of the whole model")
            given = " and ".join(f"{place} in {str(dtype).removeprefix('torch.')}" for dtype, place in dtypes.items())
            faults.add(
                f"the shard unit {where} would hold two dtypes, and cannot be split: {given}",
                fix="pin a module that is called and shares no weight with others, or untie the weights "
                "(transformers: tie_word_embeddings=False)",
            )


# ------------------------------------------------------------------ weights that every rank has alike


def broadcast_from_first(model: nn.Module, device: torch.device) -> None:
    """Give every rank the parameters and buffers of rank 0, one at a time, as DistributedDataParallel does."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta" and not hasattr(tensor, "to_local"):
            _broadcast_(tensor, device)


def _broadcast_(tensor: Tensor, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    there = tensor.detach().to(device).contiguous()
    # bytes travel as such: gloo knows no float8
    dist.broadcast(there.view(torch.uint8) if there.itemsize == 1 else there, group=group, group_src=0)
    tensor.data.copy_(there)


def share_buffers(model: nn.Module, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Broadcast the first rank's saved buffers (a batch norm's statistics), which each rank updates by itself."""
    for tensor in saved_buffers(model):
        if not isinstance(tensor, DTensor):
            _broadcast_(tensor, device, group)


def notes_on_parameters(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what a model noted on each parameter, by name, such as S4's ``_optim`` or Mamba's ``_no_weight_decay``."""
    return {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}


def restore_notes(model: nn.Module, noted: dict[str, dict[str, Any]]) -> None:
    """Give parameters what the model noted on them before it was sharded: ``fully_shard`` and ``to`` make new ones."""
    for name, parameter in model.named_parameters():
        for key, value in noted.get(name, {}).items():
            if key not in vars(parameter):
                setattr(parameter, key, value)


def shard(
    model: nn.Module,
    inner: Sequence[nn.Module],
    mesh: DeviceMesh,
    device: torch.device,
    reduce_dtype: str,
    *,
    cpu_offload: bool = False,
    **options: Any,
) -> None:
    """Shard the units ``inner`` and then ``model`` in place over ``mesh``, of which this process has ``device``.

    ``options`` are ``fully_shard``'s. No ``param_dtype``: it would change what norms and embeddings run in, and a step
    would no longer be that of DDP.
    """
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=to_torch(reduce_dtype), cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy(),
        **options,
    }
    place = torch.device("cpu") if cpu_offload else device
    for unit in inner:
        materialize(unit, model, place, device)
        fully_shard(unit, **options)
    materialize(model, model, place, device)
    # The root's forward is the whole step, after which backward begins at once: nothing is to be freed in between, and
    # where the step calls self(x), what comes after that call still needs the root's weights.
    options.pop("reshard_after_forward", None)
    fully_shard(model, **options)
    make_root(model)  # a block that is called before a step must not become one


def whole_on_cpu(value: Any, *, keep: bool = True) -> Any:
    """A tensor on the CPU, joined if it is sharded, which all ranks do; nothing of it unless ``keep``."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, Tensor):
        return value
    return value.detach().cpu() if keep else None


# ------------------------------------------------------------------ the meta device

_FLOATING = (*TORCH_DTYPES.values(), torch.float64)


def cannot_initialise(model: nn.Module, faults: Faults) -> None:
    """Note modules on the meta device that nothing says how to initialise."""
    for name, module in model.named_modules():
        if any(tensor.is_meta for tensor in _own(module).values()) and not _initialisers(module, model):
            faults.add(
                f"module {name or type(model).__name__!r} on the meta device, which has no reset_parameters()",
                fix="give the module reset_parameters(), or build it outside init_module(empty_init=True)",
            )


def materialize(
    unit: nn.Module, root: nn.Module, place: torch.device, device: torch.device, *, recurse: bool = True
) -> None:
    """Make what ``unit`` has on the meta device at ``place``, initialise it, and broadcast rank 0's values.

    Ties hold; the first owner of a tied weight decides its values. ``device`` is what the ranks communicate over.
    Without ``recurse`` only what is ``unit``'s own is made.

    Raises:
        PlanError: a module's initialisation left a tensor untouched.
    """
    every = list(unit.modules() if recurse else (unit,))
    waiting = [module for module in every if any(one.is_meta for one in _own(module).values())]
    if not waiting:
        return
    kept = {id(one): one for module in waiting for one in _own(module).values() if one.is_meta}
    made = {key: _marked(one, place) for key, one in kept.items()}
    for module in root.modules():  # wherever it is tied
        for key, tensor in _own(module).items():
            if id(tensor) in made:
                setattr(module, key, made[id(tensor)])
    with torch.no_grad():
        for module in reversed(waiting):  # children before parents, as ``apply`` does
            for initialiser in _initialisers(module, root):
                initialiser()
    untouched = {id(one) for one in made.values() if one.dtype in _FLOATING and bool(one.detach().isnan().any())}
    with Faults("strategy") as faults:
        for name, tensor in (*root.named_parameters(), *root.named_buffers()) if untouched else ():
            if id(tensor) in untouched:
                faults.add(
                    f"{name!r} on the meta device, which its module's initialisation leaves as it is",
                    fix="set it in reset_parameters(), or build the module outside init_module(empty_init=True)",
                )
    for tensor in made.values():
        _broadcast_(tensor, device)


def _own(module: nn.Module) -> dict[str, Tensor]:
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return dict([*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)])


def _marked(tensor: Tensor, place: torch.device) -> Tensor:
    """A tensor like it at ``place``, of NaN where it is floating: a mark of not being initialised."""
    mark = math.nan if tensor.dtype in _FLOATING else 0
    new = torch.full_like(tensor.detach(), mark, device=place)
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    for key, value in vars(tensor).items():
        if key != IS_INITIALIZED:
            setattr(new, key, value)
    return new


def _initialisers(module: nn.Module, root: nn.Module) -> list[Callable[[], Any]]:
    """The module's own ``reset_parameters``, then ``_init_weights`` of the innermost model around it that has it.

    That is transformers' convention, and of many others.
    """
    own = own_reset(module)
    inside = [one for one in root.modules() if initialiser(one) and any(part is module for part in one.modules())]
    around = initialiser(inside[-1]) if inside else None
    return [*([own] if own else []), *([partial(around, module)] if around else [])]
