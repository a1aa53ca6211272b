"""Dtypes by their short names, nested data, casts of data and of modules, and devices with TF32.

Nested data are tuples, named tuples, lists, mappings (transformers' ``ModelOutput`` too) and
dataclasses. Tensors inside anything else, such as a key-value cache, are not found.
"""

import re
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_mp.compat import torch as compat
from lightning_mp.compat.torch_fake import is_fake
from lightning_mp.policy.hardware import Device

HALF = (torch.float16, torch.bfloat16)
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: classes of tensors that store their numbers in their dtype
_PLAIN: set[type] = {Tensor, nn.Parameter, UninitializedParameter, UninitializedBuffer}
_ORDINARY = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: dtypes in which quantized weights are packed (GPTQ, AWQ, EETQ, MXFP4)
_PACKED = (torch.int8, torch.uint8, torch.int16, torch.int32)
#: names of packed weights; masks, positions and indices are integers too, and do not match
_PACKED_NAME = re.compile(r"(?!.*(mask|index|ids))(.*(weight|pack|quant|code|block|int[48])|q|w_q|w$)", re.IGNORECASE)
_SCALE = re.compile(r"scale|absmax|zero", re.IGNORECASE)
#: words of quantization in the name of a parameter's class or attribute
_QUANTIZES = re.compile(r"quant|int\d|\dbit|nf4|fp4", re.IGNORECASE)


def to_torch(name: str) -> torch.dtype:
    """Return the torch dtype of ``"fp32"``, ``"bf16"`` or ``"fp16"``. Raise KeyError for others."""
    return TORCH_DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: ``"fp32"``, ``"bf16"``, ``"fp16"`` or ``"fp64"``.

    Every 8-bit float is ``"fp8"``. Other dtypes keep torch's name, such as ``"int64"``.
    """
    plain = str(dtype).removeprefix("torch.")
    names = {known: name for name, known in TORCH_DTYPES.items()} | {torch.float64: "fp64"}
    return "fp8" if plain.startswith("float8") else names.get(dtype, plain)


def cast_floating(data: Any, dtype: torch.dtype) -> Any:
    """Return nested ``data`` with every real floating tensor cast to ``dtype``.

    Tensors that have the dtype, and containers without a change, are not copied.
    """
    return map_tensors(data, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def cast_within_range(data: Any, dtype: torch.dtype) -> Any:
    """Cast as ``cast_floating``, and clamp finite numbers of tensors without gradient to the range.

    A mask of fp32's lowest number then stays finite. Numbers of tensors that require a gradient may
    become infinite, so that the step counts as an overflow.
    """

    def within(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        result, largest = tensor.to(dtype), torch.finfo(dtype).max
        if tensor.requires_grad or torch.finfo(tensor.dtype).max <= largest:
            return result
        return torch.where(tensor.isinf(), result, result.clamp(-largest, largest))

    return map_tensors(data, within)


def floating_dtype(data: Any) -> torch.dtype | None:
    """Return the dtype of the first real floating tensor in nested ``data``, or ``None``."""
    return next((tensor.dtype for tensor in floating_in(data)), None)


def is_plain(tensor: Tensor) -> bool:
    """True if the tensor has torch's own class and is in fp32, bf16, fp16 or fp64.

    Other tensors may be packed or quantized: a subclass (bitsandbytes' ``Params4bit``, torchao's),
    float8, integers. A parameter's own class counts, not the class of its ``data``. A fake tensor
    (``FakeTensorMode``) counts as a tensor of torch's own class.
    """
    return (type(tensor) in _PLAIN or is_fake(tensor.data)) and tensor.dtype in _ORDINARY


def castable(module: nn.Module) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the parameters and the buffers of the module itself that may be cast.

    These are its ordinary floating tensors (``is_plain``), and parameters of classes that only mark
    them. In a module with a quantized weight, only a bias and trained parameters other than scales
    may be cast, and no buffer. Scales and lookup tables keep the dtype that the kernel reads.
    """
    weights, others = dict(module.named_parameters(recurse=False)), dict(module.named_buffers(recurse=False))
    scaled = any(map(_SCALE.search, (*weights, *others)))
    packed = (_is_packed(key, buffer) for key, buffer in others.items() if scaled and buffer.ndim > 1)
    if any(_is_quantized(key, weight) for key, weight in weights.items()) or any(packed):
        trained = {key for key, weight in weights.items() if weight.requires_grad and "scale" not in key}
        weights, others = {key: weight for key, weight in weights.items() if key in trained or "bias" in key}, {}
    own = [tensor for tensor in weights.values() if is_plain(tensor) or _is_marked(tensor)]
    return own, list(filter(is_plain, others.values()))


def _is_packed(key: str, tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return tensor.element_size() == 1
    return tensor.dtype in _PACKED and tensor.ndim > 1 and _PACKED_NAME.match(key) is not None


def _is_quantized(key: str, parameter: Tensor) -> bool:
    if is_plain(parameter) or hasattr(parameter, "to_local") or _is_marked(parameter):
        return False
    return type(parameter) is not nn.Parameter or _is_packed(key, parameter)


def _is_marked(tensor: Tensor) -> bool:
    """True if the tensor is a parameter whose ``data`` is an ordinary floating tensor of torch's.

    It is False for a frozen parameter whose class or attributes are named after quantization
    (bitsandbytes' ``Int8Params``), because that one will be quantized later.
    """
    if not isinstance(tensor, nn.Parameter) or type(tensor.data) is not Tensor or tensor.dtype not in _ORDINARY:
        return False
    words = (type(tensor).__name__, *vars(tensor))
    return tensor.requires_grad or not any(map(_QUANTIZES.search, words))


def uncastable(module: nn.Module) -> set[int]:
    """Return ``id`` of the parameters and buffers of the module itself that are not ``castable``.

    DTensors are left out, because sharded tensors were cast before.
    """
    cast = set(map(id, chain(*castable(module))))
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return {id(tensor) for tensor in own if id(tensor) not in cast and not hasattr(tensor, "to_local")}


def cast_(tensors: Iterable[Tensor], dtype: torch.dtype, only: Collection[torch.dtype] | None = None) -> None:
    """Cast tensors in place to ``dtype``, and drop their gradients.

    A tensor that has the dtype stays unchanged. With ``only``, so does a tensor of any other dtype
    than these. The objects stay the same, so optimizers and tied weights remain valid.
    """
    for tensor in tensors:
        if tensor.dtype != dtype and (only is None or tensor.dtype in only):
            tensor.data = tensor.data.to(dtype)
            tensor.grad = None  # a new gradient could not be added to one of the old dtype


class Cast:
    """A function for a module's ``_apply`` that casts its tensors.

    Args:
        wanted: by ``id`` of parameters and buffers, the dtype that each is cast to.
        left: parameters and buffers that stay unchanged.
        attributes: the dtype of other ordinary floating tensors. A module's own ``_apply`` may pass
            tensors that are neither parameters nor buffers.
        only: the dtypes from which such other tensors are cast. ``None`` means all.
    """

    def __init__(
        self,
        wanted: Mapping[int, torch.dtype],
        left: Iterable[Tensor],
        attributes: torch.dtype,
        only: Collection[torch.dtype] | None = None,
    ) -> None:
        self._wanted, self._attributes, self._only = wanted, attributes, only
        self._left = {id(tensor): tensor for tensor in left}
        #: by ``id`` of a tensor that was cast: the tensor and the result
        self._results: dict[int, tuple[Tensor, Tensor]] = {}
        self.__qualname__ = compat.CAST_NAME

    def __repr__(self) -> str:
        return f"<function {self.__qualname__}>"

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor cast to its dtype. A tensor to leave unchanged is returned itself.

        A tensor of ``wanted`` is detached. Later calls with it return the same result.
        """
        if id(tensor) in self._left:
            return tensor
        dtype = self._wanted.get(id(tensor))
        if dtype is None:
            moves = is_plain(tensor) and (self._only is None or tensor.dtype in self._only)
            return tensor.to(self._attributes) if moves else tensor
        if id(tensor) not in self._results:
            result = tensor.detach().to(dtype)
            self._results[id(tensor)] = tensor, result
            self._left[id(result)] = result
        return self._results[id(tensor)][1]

    def run_own_apply(self, module: nn.Module) -> None:
        """Call the module's own ``_apply``. Buffers that it casts stay the same objects."""
        with compat.applied_in_place():
            compat.apply_to_tensors(module, self)
        sources = {id(result): source for source, result in self._results.values()}
        for part in module.modules():
            buffers = compat.buffers_of(part)
            for key, buffer in buffers.items():
                source = sources.get(id(buffer))
                if source is not None:
                    source.data = buffer.data
                    buffers[key] = source


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None, None, None]:
    """Make ``dtype`` torch's default dtype within the context. Restore it, also after an error."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def describe(device: torch.device) -> Device:
    """Return the facts about ``device`` that decide which precisions it can run.

    A device of an unknown type has the type as its name, and no bf16.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        with torch.cuda.device(device):  # is_bf16_supported() queries the current device
            native = torch.cuda.is_bf16_supported(including_emulation=False)
            emulated = torch.cuda.is_bf16_supported(including_emulation=True)
        bf16, rocm = "native" if native else "emulated" if emulated else "none", torch.version.hip is not None
        capability = properties.major, properties.minor
        return Device("cuda", properties.name, capability, bf16, properties.total_memory, rocm)
    if device.type == "mps":
        return Device("mps", "Apple GPU", None, "native" if torch.backends.mps.is_macos_or_newer(14, 0) else "none")
    if device.type == "cpu":
        return Device("cpu", "CPU", None, "native" if compat.cpu_has(torch.bfloat16) else "emulated")
    return Device(device.type, device.type, None, "none")


def has_tf32(device: torch.device) -> bool:
    """True if products on ``device`` can run in TF32: NVIDIA GPUs since compute capability 8.0."""
    return device.type == "cuda" and describe(device).tf32


def tf32_refusal() -> tuple[str, str] | None:
    """Return (problem, fix) if ``set_tf32`` could not restore TF32 after a run, else ``None``.

    It could not if the user has set one of torch's newer ``fp32_precision`` switches.
    """
    backends: Any = torch.backends
    with suppress(RuntimeError):
        # Each of these raises if the newer switches contradict it.
        _ = torch.get_float32_matmul_precision(), backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
        if {backends.fp32_precision, backends.cudnn.fp32_precision} == {"none"}:
            return None
    given = "torch.backends.fp32_precision, or that of a backend, was set: with it, TF32 cannot be put back after a run"
    return given, "use torch.set_float32_matmul_precision() and torch.backends.cudnn.allow_tf32 instead, or only tf32="


def set_tf32(setting: str) -> Callable[[], None]:
    """Set the precision of fp32 matrix products and of cuDNN. Return a function that restores it.

    ``setting`` is ``"highest"``, ``"high"`` or ``"medium"``. ``"highest"`` is IEEE fp32 for both.
    The others allow TF32. If ``tf32_refusal()`` returns a problem, setting or restoring may fail.
    """
    backends: Any = torch.backends
    cudnn, switches = backends.cudnn, [backends.cuda.matmul, backends.mkldnn.matmul]
    matmul, convolutions, wanted = torch.get_float32_matmul_precision(), cudnn.allow_tf32, setting != "highest"
    # If nothing changes, cuDNN is not written: torch's default then still follows a wider switch.
    if convolutions != wanted:
        switches += [cudnn.conv, cudnn.rnn]
    before = [switch.fp32_precision for switch in switches]

    def restore() -> None:
        torch.set_float32_matmul_precision(matmul)
        if convolutions != wanted:
            cudnn.allow_tf32 = convolutions
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value  # the older calls have replaced "none" by "ieee"

    torch.set_float32_matmul_precision(setting)
    if convolutions != wanted:
        cudnn.allow_tf32 = wanted
    return restore


def tensors_in(data: Any) -> list[Tensor]:
    """Return every tensor in nested ``data``, in order."""
    if isinstance(data, Tensor):
        return [data]
    return [tensor for _, item in _items(data) for tensor in tensors_in(item)]


def floating_in(data: Any) -> list[Tensor]:
    """Return every real floating tensor in nested ``data``, in order."""
    return [tensor for tensor in tensors_in(data) if tensor.is_floating_point()]


def map_tensors(data: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return nested ``data`` with ``change`` applied to every tensor.

    A container is copied only if one of its items changes.
    """
    if isinstance(data, Tensor):
        return change(data)
    changed: dict[Any, Any] = {}
    for key, old in _items(data):
        new = map_tensors(old, change)
        if new is not old:
            changed[key] = new
    return _replaced(data, changed) if changed else data


def _items(data: Any) -> list[tuple[Any, Any]]:
    if isinstance(data, Mapping):
        return list(cast("Mapping[Any, Any]", data).items())
    if isinstance(data, (tuple, list)):
        return list(enumerate(cast("list[Any]", data)))
    if is_dataclass(data) and not isinstance(data, type):
        return [(item.name, getattr(data, item.name)) for item in fields(data)]
    return []


def _replaced(data: Any, changed: dict[Any, Any]) -> Any:
    if isinstance(data, (tuple, list)):
        items = [changed.get(index, item) for index, item in enumerate(cast("list[Any]", data))]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if isinstance(data, Mapping) and not isinstance(data, MutableMapping):
        return cast("Any", type(data))({**data, **changed})
    copied = copy(data)  # keeps attributes of a subclass, such as a defaultdict's factory
    for key, value in changed.items():  # transformers' ModelOutput has no update()
        if isinstance(data, Mapping):
            copied[key] = value
        else:
            object.__setattr__(copied, key, value)  # works for a frozen dataclass too
    return copied
