"""torch's private names, each behind a function that says what it is for."""

import inspect
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_mp.compat import require_versions

# Before a private name is read: a release that lacks one is refused in a sentence.
require_versions("MixedPrecisionPlan", "torch")

_torch: Any = torch
#: as ``__torch_function__`` of a tensor's class: functions see the tensor as one of torch's own
NO_TORCH_FUNCTION: Any = _torch._C._disabled_torch_function_impl


def as_wrapper(cls: Any, tensor: Tensor, dtype: torch.dtype) -> Any:
    """A tensor of class ``cls`` without values of its own, which looks like ``tensor`` in ``dtype``."""
    options: dict[str, Any] = {"storage_offset": tensor.storage_offset(), "dtype": dtype, "device": tensor.device}
    return _torch.Tensor._make_wrapper_subclass(cls, tensor.shape, tensor.stride(), **options)


# ------------------------------------------------------------------ gradients and the scale


#: ``(grads, found_inf, inv_scale)``: multiplies ``grads`` (one device, one dtype) by ``inv_scale`` in place, and sets
#: ``found_inf`` to 1 where one was not finite: the multi-tensor kernel behind ``torch.amp.GradScaler``
unscale_and_check_: Any = _torch._amp_foreach_non_finite_check_and_unscale_
#: each of several tensors of one dtype and device by a scalar, in place
multiply_: Any = _torch._foreach_mul_
#: ``(scale, growth_tracker, found_inf, growth factor, backoff factor, growth interval)``: that of its ``update``
update_scale_: Any = _torch._amp_update_scale_
#: ``(tensors, order, dtype)``: the norm of each, computed in ``dtype`` (``None``: its own), in one launch
norms: Any = _torch._foreach_norm


def makes_optimizer_state() -> bool:
    """Whether the step under way is one of ``torch.distributed.checkpoint``: of rate 0, to have state to load into."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            return True
        frame = frame.f_back
    return False


#: by which an optimizer (a fused one) says that it unscales, and skips by ``found_inf``, on the device
TAKES_FLAG = "_step_supports_amp_scaling"


def left_scaled_by_stock(optimizer: Any) -> bool:
    """True if torch's scaler, and Lightning's plugin with it, leave the gradients scaled until the optimizer steps."""
    return getattr(optimizer, TAKES_FLAG, False)


def set_mark(gradient: Any, mark: int) -> None:
    """Mark a gradient. The mark goes when the tensor does, as when ``zero_grad()`` drops it."""
    gradient.lightning_mp_mark = mark


def mark_of(gradient: Tensor) -> int | None:
    """The gradient's mark, if it has one."""
    return getattr(gradient, "lightning_mp_mark", None)


#: where the state dict of a ``GradScaler`` has its count of clean steps
GROWTH_TRACKER = "_growth_tracker"


def set_scale(scaler: Any, scale: Tensor, growth_tracker: Tensor) -> None:
    """Put both where ``GradScaler`` keeps them, for code that looks there."""
    scaler._scale, scaler._growth_tracker = scale, growth_tracker


def waits_for_unscale(scaler: Any, optimizer: Optimizer) -> bool:
    """Whether nobody has unscaled the optimizer's gradients since its last step."""
    return scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY


# ------------------------------------------------------------------ learning rates

#: where the state dict of ``SequentialLR`` and ``ChainedScheduler`` has those of their schedulers
INNER_SCHEDULERS = "_schedulers"
#: where that of any scheduler has the learning rates that it had come to, one a param group
LAST_RATES = "_last_lr"


# ------------------------------------------------------------------ operators and autograd

#: the file in which Python calls into the autograd engine
ENGINE = str(Path("torch", "autograd", "graph.py"))
#: the files whose functions torch wraps around every dispatch mode
_AROUND_MODES = tuple(str(Path("torch", *file)) for file in (("_compile.py",), ("_dynamo", "eval_frame.py")))


def calling_frame(file: str) -> FrameType | None:
    """Of a dispatch mode in ``file``: the Python code that called the operator; none where the autograd engine did."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.endswith((__file__, file, *_AROUND_MODES)):
        frame = frame.f_back
    return frame


def outside_of_dispatch_modes(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the code that called an operator, if other dispatch modes (an audit) passed it on.

    Each such mode, and torch around it, has new frames for every operator. Without one it is ``frame``.
    """
    caller = frame
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__":
            caller = frame.f_back
            while caller is not None and caller.f_code.co_filename.endswith(_AROUND_MODES):
                caller = caller.f_back
        frame = frame.f_back
    return caller


def in_backward() -> bool:
    """Whether a backward pass is under way."""
    return _torch._C._current_graph_task_id() != -1


def in_backward_formula() -> bool:
    """Whether a node of the graph is being computed: not so in a hook before it."""
    return _torch._C._current_autograd_node() is not None


def backward_traced_outside_autocast() -> AbstractContextManager[None]:
    """Within, ``torch.compile`` traces backward passes outside of autocast, where Lightning runs them.

    AOTAutograd traces them at the time of the forward, by default under the autocast around the compiled region: what
    turns autocast off inside would have a half-precision backward. The setting is read at each tracing in this thread.
    """
    return import_module("torch._functorch.config").patch(backward_pass_autocast="off")


@contextmanager
def attention_calls_its_modules() -> Generator[None, None, None]:
    """Within, torch's attention and encoder layers call their children in evaluation too.

    Their fast path hands weights to one operator instead. It goes past pins, and ignores autocast on a CPU.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def cpu_attention() -> dict[Any, Any]:
    """Fused attention on a CPU, forward and backward, beside CUDA's, which the flop registry has only."""
    names = ("_scaled_dot_product_flash_attention{}", "_scaled_dot_product_flash_attention{}_backward")
    aten: Any = torch.ops.aten
    return {getattr(aten, name.format("_for_cpu")): getattr(aten, name.format("")) for name in names}


#: the operators of fused attention, by their names in ``torch.ops.aten``
FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def cpu_has(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices in ``dtype`` (bf16 or fp16) natively, as oneDNN sees it."""
    supported = "_is_mkldnn_bf16_supported" if dtype is torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, supported)()


def cpu_has_lstm(dtype: torch.dtype) -> bool:
    """Whether an LSTM trains in ``dtype`` under autocast here, without projections and on inputs that are not packed.

    One is tried: oneDNN lacks most of them, and code may have switched oneDNN off.
    """
    one, state = torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)
    weights = [torch.zeros(4, 1, requires_grad=True) for _ in range(2)]
    try:
        with torch.autocast("cpu", dtype):
            torch.lstm(one, (state, state), weights, False, 1, 0.0, True, False, False)
    except RuntimeError:
        return False
    return True


@contextmanager
def without_onednn() -> Generator[None, None, None]:
    """Within, operators on a CPU do not use oneDNN; the public switch sets its TF32 too, and warns of that."""
    before = _torch._C._get_mkldnn_enabled()
    _torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        _torch._C._set_mkldnn_enabled(before)


# ------------------------------------------------------------------ modules

#: Parts that wrappers put into names: Fabric's, FSDP1's, ``torch.compile``'s, the checkpoint wrapper's. Not "module":
#: no strategy here leaves that one behind, and a LightningModule may well call its model so.
WRAPPERS = frozenset({"_forward_module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})


#: a module's own buffers, to be changed in place
buffers_of = attrgetter("_buffers")
#: where a module keeps its children, as they are now and will be
children_of = attrgetter("_modules")
#: what a batch norm of any dimension is, torch's ``SyncBatchNorm`` included
BATCH_NORM: Any = _torch.nn.modules.batchnorm._BatchNorm


def overwritten(operator: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that ``operator`` writes to, lists of tensors flattened."""
    schema = getattr(operator, "_schema", None)  # operators of a higher order have none
    if schema is None or not schema.is_mutable:
        return []
    given = zip(schema.arguments, [*args, *([None] * len(schema.arguments))], strict=False)
    written = [
        kwargs.get(argument.name, value)
        for argument, value in given
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tree_leaves(written)


def version(tensor: Tensor | None) -> int | None:
    """How often it was written to; tensors made in inference mode do not count it."""
    return None if tensor is None or tensor.is_inference() else tensor._version


def saved_buffers(model: nn.Module) -> Iterator[Tensor]:
    """The buffers that are in a module's state dict."""
    module: Any
    for module in model.modules():
        named = module.named_buffers(recurse=False)
        yield from (tensor for name, tensor in named if name not in module._non_persistent_buffers_set)


def unsaved_buffers(module: Any) -> Iterator[tuple[str, Tensor]]:
    """The module's own buffers, with their names, that are in no state dict."""
    for name, tensor in module.named_buffers(recurse=False):
        if name in module._non_persistent_buffers_set:
            yield name, tensor


def has_forward_hooks(module: Any) -> bool:
    """Whether anything is called before or after the module's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def apply_to_tensors(module: Any, fn: Callable[[Tensor], Tensor]) -> None:
    """What ``module.to()`` does: ``fn`` on every parameter, gradient and buffer."""
    module._apply(fn)


def has_own_apply(cls: Any) -> bool:
    """Whether the class decides itself what ``module.to()`` does: torch's LSTM, a metric, a detector with anchors."""
    return cls._apply is not cast("Any", nn.Module)._apply


def apply_takes_recurse(cls: Any) -> bool:
    """Whether ``_apply`` of the class can be asked to leave its children out; many are written ``_apply(self, fn)``."""
    parameters = inspect.signature(cls._apply).parameters
    return "recurse" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


@contextmanager
def applied_in_place() -> Generator[None, None, None]:
    """Within, ``module.to()`` keeps the identity of parameters, whatever ``torch.__future__`` says."""
    future: Any = torch.__future__
    overwrites = future.get_overwrite_module_params_on_conversion()
    swaps = future.get_swap_module_params_on_conversion()
    future.set_overwrite_module_params_on_conversion(False)
    future.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        future.set_overwrite_module_params_on_conversion(overwrites)
        future.set_swap_module_params_on_conversion(swaps)


#: the name of the function that ``module.type(dtype)`` applies: torchmetrics tells a cast by it, and keeps its states
CAST_NAME = "Module.type.<locals>.<lambda>"


def shard_storage(path: str, *, writes: bool = False) -> Any:
    """Return the reader or writer of torch.distributed.checkpoint for a folder on the disk or behind fsspec."""
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

    if "://" not in path:
        return FileSystemWriter(path) if writes else FileSystemReader(path)
    # The module is public since torch 2.15, where its private name warns.
    public = find_spec("torch.distributed.checkpoint.fsspec_filesystem") is not None
    folder: Any = import_module(f"torch.distributed.checkpoint.{'' if public else '_'}fsspec_filesystem")
    return folder.FsspecWriter(path) if writes else folder.FsspecReader(path)


def read_shards(path: Path, keys: set[str] | None = None) -> dict[str, Any]:
    """What torch.distributed.checkpoint wrote to a folder, or what is below ``keys``: whole tensors on the CPU.

    Neither a model nor a process group is needed, and where there is a group, each rank reads for itself.
    """
    from torch.distributed import checkpoint

    content: dict[str, Any] = {}
    here: Any = checkpoint
    planner = here.default_planner._EmptyStateDictLoadPlanner(keys)
    here.state_dict_loader._load_state_dict(content, here.FileSystemReader(path), planner=planner, no_dist=True)
    return content


def load_own_tensors(module: Any, state: dict[str, Any], prefix: str, *problems: list[str]) -> None:
    """``load_state_dict`` for the tensors of ``module`` itself; adds to the lists missing, unexpected and errors.

    The module's own hooks may rename what is in ``state``.
    """
    module._load_from_state_dict(state, prefix, {}, True, *problems)


def own_reset(module: nn.Module) -> Callable[[], Any] | None:
    """What initialises the module's own tensors, if it has such a method."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called, or ``module.forward = torch.compile(module.forward)`` written."""
    own = vars(module)
    forward = own.get("forward", own.get("_lmp_forward"))  # under the second name while the module is pinned
    return own.get("_compiled_call_impl") is not None or hasattr(forward, "_torchdynamo_orig_callable")


def traces_graphs(root: nn.Module) -> bool:
    """Whether ``torch.compile`` was used on a part of ``root``, or on anything in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    used = dynamo is not None and bool(dynamo.counters["stats"])
    return used or any(map(is_compiled, root.modules()))


def reentrant(module: nn.Module) -> bool | None:
    """Whether torch's checkpoint wrapper uses reentrant checkpointing; ``None`` where it is no such wrapper."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, CheckpointWrapper

    return module.checkpoint_impl is CheckpointImpl.REENTRANT if isinstance(module, CheckpointWrapper) else None
