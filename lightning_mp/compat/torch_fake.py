"""torch's private names around tensors without memory."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

from lightning_mp.compat import patched

#: operators: a read by the host; a cast; the check of gradients for infinities; the scale's rule; indexing; pinning
READ = torch.ops.aten._local_scalar_dense.default
CAST = torch.ops.aten._to_copy.default
CHECK = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
UPDATE_SCALE = torch.ops.aten._amp_update_scale_.default
INDEX = torch.ops.aten.index.Tensor
PIN_MEMORY = torch.ops.aten._pin_memory.default
#: the leaves of nested data in order; nested data with a function applied to each leaf
leaves, mapped = tree_leaves, tree_map


def is_fake(tensor: object) -> bool:
    """True if it has a shape and a dtype, and no memory."""
    return isinstance(tensor, FakeTensor)


def wraps(kind: Any) -> bool:
    """True if tensors of this class hold other tensors (``DTensor``) and have no storage of their own."""
    own: Any = Tensor
    return not issubclass(kind, FakeTensor) and kind.__torch_dispatch__ is not own.__torch_dispatch__


def constant_of(tensor: Any) -> Tensor | None:
    """Return the value of a fake tensor that torch itself knows, else ``None``."""
    return tensor.constant if isinstance(tensor, FakeTensor) else None


def storage_key(owner: Tensor | torch.UntypedStorage) -> int:
    """Return a number that a storage, and all tensors on it, share while the storage is alive."""
    return cast("Any", owner.untyped_storage() if isinstance(owner, Tensor) else owner)._cdata


@contextmanager
def moved_in_place() -> Generator[None, None, None]:
    """Within, ``module.to()`` and its kind change fakes in place. torch would swap them, which weak references prevent.

    A fake that is assigned another fake's ``data`` also takes over its device, which torch itself does not do.
    """
    before, data = cast("Any", nn.Module)._apply, cast("Any", Tensor).data

    def take(tensor: Any, moved: Tensor) -> None:
        data.__set__(tensor, moved)
        tensor.fake_device = moved.device

    def apply(module: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not any(map(is_fake, own)):
            return before(module, fn, recurse)
        for child in module.children() if recurse else ():
            child._apply(fn)
        with torch.no_grad():
            for tensor in [*own, *(tensor.grad for tensor in own if tensor.grad is not None)]:
                moved = fn(tensor)
                if moved is not tensor:
                    tensor.data = moved
        return module

    with patched(nn.Module, _apply=apply), patched(FakeTensor, data=property(data.__get__, take)):
        yield


@contextmanager
def resizes_told(tell: Callable[[Any], None]) -> Generator[None, None, None]:
    """Within, call ``tell`` with every storage that is resized."""
    before = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = before(storage, size)
        tell(storage)
        return result

    with patched(torch.UntypedStorage, resize_=resize):
        yield


def without_modes() -> AbstractContextManager[Any]:
    """Within, operators run for real."""
    return import_module("torch.utils._python_dispatch")._disable_current_modes()


@contextmanager
def fake_ranks(world_size: int, known: Callable[[Tensor], Tensor | None]) -> Generator[None, None, None]:
    """Within, this process is the first of ``world_size`` ranks, whose collectives move nothing.

    A mesh looks up its ranks in tensors, so these are real. ``known`` returns the values of a fake.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    group_of, mesh = dist.new_group, cast("Any", DeviceMesh)

    def gather(everywhere: list[Any], mine: Any, group: Any = None) -> None:
        everywhere[:] = [mine] * len(everywhere)

    def for_real(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            given = mapped(lambda leaf: known(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            with without_modes():
                return method(*given[0], **given[1])

        return run

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    fake = patched(
        dist,
        all_gather_object=gather,
        new_group=lambda *args, **kwargs: group_of(*args, **{**kwargs, "backend": "fake"}),
    )
    real = {"__init__": for_real(mesh.__init__), "__getitem__": for_real(mesh.__getitem__)}
    try:
        with fake, patched(mesh, **real, mesh=property(for_real(mesh.mesh.fget))):
            yield
    finally:
        dist.destroy_process_group()
