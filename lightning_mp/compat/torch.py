"""torch's private names, each behind a public name that says its purpose."""

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

# Before the first private name is read: a release without it gets a PlanError.
require_versions("MixedPrecisionPlan", "torch")

_torch: Any = torch
#: a ``__torch_function__`` for a tensor subclass: functions treat it as one of torch's own tensors
NO_TORCH_FUNCTION: Any = _torch._C._disabled_torch_function_impl


def as_wrapper(cls: Any, tensor: Tensor, dtype: torch.dtype) -> Any:
    """Return a tensor of class ``cls`` without storage, with the shape and device of ``tensor``.

    Strides and storage offset are equal too. Its dtype is ``dtype``.
    """
    options: dict[str, Any] = {"storage_offset": tensor.storage_offset(), "dtype": dtype, "device": tensor.device}
    return _torch.Tensor._make_wrapper_subclass(cls, tensor.shape, tensor.stride(), **options)


# ------------------------------------------------------------------ gradients and the scale


#: ``(grads, found_inf, inv_scale)``: the multi-tensor kernel behind ``torch.amp.GradScaler``. It
#: multiplies ``grads`` (one device, one dtype) by ``inv_scale`` in place, and sets ``found_inf`` to
#: 1 if one is not finite.
unscale_and_check_: Any = _torch._amp_foreach_non_finite_check_and_unscale_
#: ``(tensors, scalar)``: multiplies each tensor (one device, one dtype) by the scalar in place
multiply_: Any = _torch._foreach_mul_
#: the kernel behind ``GradScaler.update``: ``(scale, growth_tracker, found_inf, growth factor,
#: backoff factor, growth interval)``
update_scale_: Any = _torch._amp_update_scale_
#: ``(tensors, order, dtype)``: the norm of each tensor, computed in ``dtype`` (``None``: its own)
norms: Any = _torch._foreach_norm


def makes_optimizer_state() -> bool:
    """True if ``torch.distributed.checkpoint`` called the optimizer step that is under way.

    It steps with a learning rate of 0, to create the state that it loads into.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            return True
        frame = frame.f_back
    return False


#: the attribute by which a fused optimizer declares that its step skips by ``found_inf``
TAKES_FLAG = "_step_supports_amp_scaling"


def left_scaled_by_stock(optimizer: Any) -> bool:
    """True if torch's GradScaler leaves the gradients scaled until the optimizer steps.

    Lightning's own plugin then does so too.
    """
    return getattr(optimizer, TAKES_FLAG, False)


def set_mark(gradient: Any, mark: int) -> None:
    """Mark a gradient. The mark is lost with the tensor, as when ``zero_grad()`` drops it."""
    gradient.lightning_mp_mark = mark


def mark_of(gradient: Tensor) -> int | None:
    """Return the gradient's mark, or ``None`` without one."""
    return getattr(gradient, "lightning_mp_mark", None)


#: the key of the count of clean steps in the state dict of a ``GradScaler``
GROWTH_TRACKER = "_growth_tracker"


def set_scale(scaler: Any, scale: Tensor, growth_tracker: Tensor) -> None:
    """Set the private attributes of a ``GradScaler``, for code that reads them."""
    scaler._scale, scaler._growth_tracker = scale, growth_tracker


def waits_for_unscale(scaler: Any, optimizer: Optimizer) -> bool:
    """True if the ``GradScaler`` has not unscaled the optimizer's gradients since its update."""
    return scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY


def hooks_before_step(optimizer: Any) -> list[Callable[..., Any]]:
    """Return the hooks that ``optimizer.register_step_pre_hook`` has registered on this optimizer."""
    return list(getattr(optimizer, "_optimizer_step_pre_hooks", {}).values())


# ------------------------------------------------------------------ learning rates

#: the key of the inner schedulers' states in the state dict of SequentialLR and ChainedScheduler
INNER_SCHEDULERS = "_schedulers"
#: the key of the last learning rates, one for each param group, in the state dict of a scheduler
LAST_RATES = "_last_lr"


# ------------------------------------------------------------------ operators and autograd

#: the file in which Python calls into the autograd engine
ENGINE = str(Path("torch", "autograd", "graph.py"))
#: the files whose functions torch wraps around every dispatch mode
_AROUND_MODES = tuple(str(Path("torch", *file)) for file in (("_compile.py",), ("_dynamo", "eval_frame.py")))


def calling_frame(file: str) -> FrameType | None:
    """Return the frame that called the operator which a dispatch mode in ``file`` intercepts.

    Frames of ``file``, of this module, and of torch's code around dispatch modes are skipped. For
    an operator that the autograd engine called, the frame is in ``ENGINE``. The engine's own
    threads have no such frame: the result is ``None``.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.endswith((__file__, file, *_AROUND_MODES)):
        frame = frame.f_back
    return frame


def outside_of_dispatch_modes(frame: FrameType | None) -> FrameType | None:
    """Return the frame that called the operator from outside of all dispatch modes.

    A dispatch mode that forwards an operator, such as an audit's, adds a ``__torch_dispatch__``
    frame, and torch adds frames around it. The result is the caller of the outermost such frame,
    or ``None`` if there is no caller. Without such a frame the result is ``frame``.
    """
    caller = frame
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__":
            caller = frame.f_back
            while caller is not None and caller.f_code.co_filename.endswith(_AROUND_MODES):
                caller = caller.f_back
        frame = frame.f_back
    return caller


def function_caller() -> str:
    """Return the name of the module that called a function which ``__torch_function__`` handles.

    The caller is outside of every mode that handles it. torch adds a mode of its own after
    ``torch.set_default_device``. The result is empty outside of such a method.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "__torch_function__":
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def in_backward() -> bool:
    """True if a backward pass is under way in this thread."""
    return _torch._C._current_graph_task_id() != -1


def in_backward_formula() -> bool:
    """True if a node of the autograd graph is being computed. False in a hook before it."""
    return _torch._C._current_autograd_node() is not None


def backward_traced_outside_autocast() -> AbstractContextManager[None]:
    """Return a context in which ``torch.compile`` traces backward passes outside of autocast.

    Lightning runs them outside of it. AOTAutograd traces them in the forward, by default under the
    autocast around the compiled region. A region that turns autocast off would then have a
    half-precision backward. The setting is read at each tracing in this thread.
    """
    return import_module("torch._functorch.config").patch(backward_pass_autocast="off")


@contextmanager
def attention_calls_its_modules() -> Generator[None, None, None]:
    """Make torch's attention and encoder layers call their children in evaluation too.

    Their fast path passes the weights to one operator instead. It bypasses pins, and ignores
    autocast on a CPU. The earlier setting is restored at the end, also after an error.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def cpu_attention() -> dict[Any, Any]:
    """Return CUDA's operator for each fused attention operator of a CPU, forward and backward.

    torch's flop registry has only the CUDA operators.
    """
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
    """True if oneDNN reports that this CPU multiplies matrices in ``dtype`` (bf16 or fp16)."""
    supported = "_is_mkldnn_bf16_supported" if dtype is torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, supported)()


def cpu_has_lstm(dtype: torch.dtype) -> bool:
    """True if a small LSTM runs in ``dtype`` under autocast on this CPU.

    It has no projection, and its input is not packed. It is tried out, because oneDNN lacks most
    LSTMs, and user code may have switched oneDNN off.
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
    """Switch oneDNN off for operators on a CPU, and restore the setting at the end.

    torch's public switch also sets oneDNN's TF32, and warns about it.
    """
    before = _torch._C._get_mkldnn_enabled()
    _torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        _torch._C._set_mkldnn_enabled(before)


# ------------------------------------------------------------------ modules

#: Parts of names that come from wrappers: Fabric, FSDP1, ``torch.compile``, the checkpoint wrapper.
#: "module" is not here: no strategy leaves it in names, and users call their model so.
WRAPPERS = frozenset({"_forward_module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})


#: the dict of a module's own buffers; changes of it change the module
buffers_of = attrgetter("_buffers")
#: the dict of a module's children; it reflects later changes
children_of = attrgetter("_modules")
#: the base class of batch norms of every dimension, and of torch's ``SyncBatchNorm``
BATCH_NORM: Any = _torch.nn.modules.batchnorm._BatchNorm


def overwritten(operator: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that ``operator`` writes to, with lists of tensors flattened.

    Empty if it writes to none, and for an operator without a schema. ``None`` stands for such an
    argument that was not passed.
    """
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
    """Return how often a tensor was written to. ``None`` for ``None`` and in inference mode."""
    return None if tensor is None or tensor.is_inference() else tensor._version


def saved_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers that are in the model's state dict, of its submodules too."""
    module: Any
    for module in model.modules():
        named = module.named_buffers(recurse=False)
        yield from (tensor for name, tensor in named if name not in module._non_persistent_buffers_set)


def unsaved_buffers(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of the buffers of the module itself that are in no state dict."""
    for name, tensor in module.named_buffers(recurse=False):
        if name in module._non_persistent_buffers_set:
            yield name, tensor


def has_forward_hooks(module: Any) -> bool:
    """True if the module has forward hooks or forward pre-hooks. Global hooks do not count."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def apply_to_tensors(module: Any, fn: Callable[[Tensor], Tensor]) -> None:
    """Apply ``fn`` to every parameter, gradient and buffer, in place, as ``module.to()`` does.

    A module with its own ``_apply`` may apply it to other tensors.
    """
    module._apply(fn)


def has_own_apply(cls: Any) -> bool:
    """True if the class overrides ``_apply``, by which ``module.to()`` works.

    Examples are torch's LSTM, torchmetrics' metrics, and detectors with anchors.
    """
    return cls._apply is not cast("Any", nn.Module)._apply


def apply_takes_recurse(cls: Any) -> bool:
    """True if the class's ``_apply`` takes ``recurse``. Many overrides are ``_apply(self, fn)``."""
    parameters = inspect.signature(cls._apply).parameters
    return "recurse" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


@contextmanager
def applied_in_place() -> Generator[None, None, None]:
    """Make ``module.to()`` keep the identity of parameters within the context.

    The settings of ``torch.__future__`` are restored at the end, also after an error.
    """
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


#: The name of the function that ``module.type(dtype)`` applies. torchmetrics recognises a cast by
#: it, and then keeps its states.
CAST_NAME = "Module.type.<locals>.<lambda>"


def shard_storage(path: str, *, writes: bool = False) -> Any:
    """Return torch.distributed.checkpoint's reader for a folder, or its writer with ``writes``.

    A path with ``://`` is a folder of an fsspec filesystem. Any other path is on the disk.
    """
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

    if "://" not in path:
        return FileSystemWriter(path) if writes else FileSystemReader(path)
    # The module is public since torch 2.15, where its private name warns.
    public = find_spec("torch.distributed.checkpoint.fsspec_filesystem") is not None
    folder: Any = import_module(f"torch.distributed.checkpoint.{'' if public else '_'}fsspec_filesystem")
    return folder.FsspecWriter(path) if writes else folder.FsspecReader(path)


def read_shards(path: Path, keys: set[str] | None = None) -> dict[str, Any]:
    """Return the content of a torch.distributed.checkpoint folder, with whole tensors on the CPU.

    With ``keys``, only the entries below these keys are read. No model and no process group is
    needed. It is no collective: each rank reads for itself.
    """
    from torch.distributed import checkpoint

    content: dict[str, Any] = {}
    here: Any = checkpoint
    planner = here.default_planner._EmptyStateDictLoadPlanner(keys)
    here.state_dict_loader._load_state_dict(content, here.FileSystemReader(path), planner=planner, no_dist=True)
    return content


def load_own_tensors(module: Any, state: dict[str, Any], prefix: str, *problems: list[str]) -> None:
    """Load the tensors of ``module`` itself from ``state``, in place and strictly.

    Keys begin with ``prefix``. ``problems`` are the lists of missing keys, unexpected keys and
    error messages. They are extended, and nothing is raised for their entries. The module's own
    hooks may rename entries of ``state``.
    """
    module._load_from_state_dict(state, prefix, {}, True, *problems)


def own_reset(module: nn.Module) -> Callable[[], Any] | None:
    """Return the method that initialises the tensors of the module itself, or ``None``.

    It is ``reset_parameters`` or ``_reset_parameters``.
    """
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None


def is_compiled(module: nn.Module) -> bool:
    """True after ``module.compile()``, or ``module.forward = torch.compile(module.forward)``."""
    own = vars(module)
    forward = own.get("forward", own.get("_lmp_forward"))  # a pinned module has the second name
    return own.get("_compiled_call_impl") is not None or hasattr(forward, "_torchdynamo_orig_callable")


def traces_graphs(root: nn.Module) -> bool:
    """True if ``torch.compile`` was used on a part of ``root``, or ran anywhere in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    used = dynamo is not None and bool(dynamo.counters["stats"])
    return used or any(map(is_compiled, root.modules()))


def is_tracing() -> bool:
    """True while ``torch.compile`` traces a graph in this thread, and reads the tensors that it meets."""
    return import_module("torch._guards").TracingContext.try_get() is not None


def reentrant(module: nn.Module) -> bool | None:
    """True if torch's checkpoint wrapper is reentrant, None if ``module`` is no such wrapper."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, CheckpointWrapper

    return module.checkpoint_impl is CheckpointImpl.REENTRANT if isinstance(module, CheckpointWrapper) else None
