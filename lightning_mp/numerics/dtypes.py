"""Dtypes by their short names, tensors in nested data, casts of data and of modules, and the device with its TF32.

Nested data are tuples, named tuples, lists, mappings (transformers' ``ModelOutput`` too) and dataclasses. Anything
else, such as a key-value cache, is not looked into.
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
#: classes of a tensor whose dtype is what it holds
_PLAIN: set[type] = {Tensor, nn.Parameter, UninitializedParameter, UninitializedBuffer}
_ORDINARY = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: dtypes in which quantized weights are packed (GPTQ, AWQ, EETQ, MXFP4), and what they are called: masks, positions
#: and indices are integers too
_PACKED = (torch.int8, torch.uint8, torch.int16, torch.int32)
_PACKED_NAME = re.compile(r"(?!.*(mask|index|ids))(.*(weight|pack|quant|code|block|int[48])|q|w_q|w$)", re.IGNORECASE)
_SCALE = re.compile(r"scale|absmax|zero", re.IGNORECASE)
#: in the name of a parameter's class, or of an attribute of it
_QUANTIZES = re.compile(r"quant|int\d|\dbit|nf4|fp4", re.IGNORECASE)


def to_torch(name: str) -> torch.dtype:
    """``"bf16"`` → ``torch.bfloat16``; the names are those of ``policy.storage_dtype``."""
    return TORCH_DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` → ``"fp32"``; every 8-bit float is ``"fp8"``, anything else keeps torch's name."""
    plain = str(dtype).removeprefix("torch.")
    names = {known: name for name, known in TORCH_DTYPES.items()} | {torch.float64: "fp64"}
    return "fp8" if plain.startswith("float8") else names.get(dtype, plain)


def cast_floating(data: Any, dtype: torch.dtype) -> Any:
    """Nested ``data`` with every real floating tensor in it cast to ``dtype``; what needs no cast is not copied."""
    return map_tensors(data, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def cast_within_range(data: Any, dtype: torch.dtype) -> Any:
    """As ``cast_floating``; what needs no gradient (a mask of fp32's lowest number) stays finite where it is.

    Activations that overflow become inf, so that the step is seen to overflow.
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
    """The dtype of the first real floating tensor in nested ``data``, or ``None``."""
    return next((tensor.dtype for tensor in floating_in(data)), None)


def is_plain(tensor: Tensor) -> bool:
    """Whether it is a tensor, parameter or buffer of torch's own class in one of the four ordinary floating dtypes.

    Anything else is packed or quantized: a subclass (bitsandbytes' ``Params4bit``, torchao's), float8, integers. The
    class that counts is the parameter's own. A tensor without memory (``FakeTensorMode``) stands for one of torch's.
    """
    return (type(tensor) in _PLAIN or is_fake(tensor.data)) and tensor.dtype in _ORDINARY


def castable(module: nn.Module) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The module's own plain parameters, and buffers (not its children's), less what belongs to a quantized weight.

    Beside one only a bias and what is trained are ordinary: scales and lookup tables stay as its kernel reads them.
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
    """Whether it is a parameter of a class that only marks it: its numbers are in a tensor of torch's own.

    A frozen one whose class or attributes speak of quantization (bitsandbytes' ``Int8Params``) is to be quantized yet.
    """
    if not isinstance(tensor, nn.Parameter) or type(tensor.data) is not Tensor or tensor.dtype not in _ORDINARY:
        return False
    words = (type(tensor).__name__, *vars(tensor))
    return tensor.requires_grad or not any(map(_QUANTIZES.search, words))


def uncastable(module: nn.Module) -> set[int]:
    """``id`` of the module's own tensors that are not ``castable``; one that is sharded has been cast before."""
    cast = set(map(id, chain(*castable(module))))
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return {id(tensor) for tensor in own if id(tensor) not in cast and not hasattr(tensor, "to_local")}


def cast_(tensors: Iterable[Tensor], dtype: torch.dtype, only: Collection[torch.dtype] | None = None) -> None:
    """Cast those of ``tensors`` that are of the dtypes ``only``, in place: optimizers and ties built on them hold."""
    for tensor in tensors:
        if tensor.dtype != dtype and (only is None or tensor.dtype in only):
            tensor.data = tensor.data.to(dtype)
            tensor.grad = None  # a gradient of the old dtype could not be added to


class Cast:
    """The function that ``_apply`` of a module is given for a cast.

    Args:
        wanted: ``id`` of parameters and buffers, and the dtype that each is cast to.
        left: parameters and buffers that stay as they are.
        attributes: the dtype of any other plain floating tensor, which a module passes in its own ``_apply``.
        only: the dtypes that such tensors are cast from; ``None``: all.
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
        #: by ``id`` of what was cast: that tensor, and the result
        self._results: dict[int, tuple[Tensor, Tensor]] = {}
        self.__qualname__ = compat.CAST_NAME

    def __repr__(self) -> str:
        return f"<function {self.__qualname__}>"

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor in its dtype: another one, unless it has that dtype already."""
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
        """Call the module's own ``_apply``; a buffer that it only cast is the same object afterwards."""
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
    """Tensors made in it without a dtype get ``dtype``; torch's default comes back, also after a failure."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def describe(device: torch.device) -> Device:
    """The facts about ``device`` that decide which precision it can run."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        with torch.cuda.device(device):  # these ask the current device
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
    """Whether products on ``device`` can run in TF32: CUDA with compute capability 8.0 (Ampere) or newer."""
    return device.type == "cuda" and describe(device).tf32


def tf32_refusal() -> tuple[str, str] | None:
    """Why ``set_tf32`` could not set TF32 and put it back, and what to do: it was set by torch's newer switches."""
    backends: Any = torch.backends
    with suppress(RuntimeError):
        # each raises where the newer switches disagree with it
        _ = torch.get_float32_matmul_precision(), backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
        if {backends.fp32_precision, backends.cudnn.fp32_precision} == {"none"}:
            return None
    given = "torch.backends.fp32_precision, or that of a backend, was set: with it, TF32 cannot be put back after a run"
    return given, "use torch.set_float32_matmul_precision() and torch.backends.cudnn.allow_tf32 instead, or only tf32="


def set_tf32(setting: str) -> Callable[[], None]:
    """Set matmul (``"highest"``, ``"high"`` or ``"medium"``) and cuDNN precision; calling the result undoes it.

    ``"highest"`` is IEEE fp32 for both; the others allow TF32. Where there is a ``tf32_refusal()`` neither is sure.
    """
    backends: Any = torch.backends
    cudnn, switches = backends.cudnn, [backends.cuda.matmul, backends.mkldnn.matmul]
    matmul, convolutions, wanted = torch.get_float32_matmul_precision(), cudnn.allow_tf32, setting != "highest"
    if convolutions != wanted:  # else they are not written: torch's default still follows a wider switch
        switches += [cudnn.conv, cudnn.rnn]
    before = [switch.fp32_precision for switch in switches]

    def restore() -> None:
        torch.set_float32_matmul_precision(matmul)
        if convolutions != wanted:
            cudnn.allow_tf32 = convolutions
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value  # the older calls write "ieee" where there was "none"

    torch.set_float32_matmul_precision(setting)
    if convolutions != wanted:
        cudnn.allow_tf32 = wanted
    return restore


def tensors_in(data: Any) -> list[Tensor]:
    """Every tensor in ``data``, in order."""
    if isinstance(data, Tensor):
        return [data]
    return [tensor for _, item in _items(data) for tensor in tensors_in(item)]


def floating_in(data: Any) -> list[Tensor]:
    """Every real floating tensor in ``data``, in order."""
    return [tensor for tensor in tensors_in(data) if tensor.is_floating_point()]


def map_tensors(data: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``data`` with ``change`` applied to every tensor; a container in which nothing changes is not copied."""
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
    copied = copy(data)  # keeps what a subclass has besides its items (a defaultdict's factory)
    for key, value in changed.items():  # transformers' ModelOutput has no update()
        if isinstance(data, Mapping):
            copied[key] = value
        else:
            object.__setattr__(copied, key, value)  # also where the dataclass is frozen
    return copied
