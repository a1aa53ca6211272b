"""A CUDA machine of nothing in a CPU build of torch, and processes on it.

Tensors on "cuda" are fakes (``FakeTensorMode``): they have a shape, a dtype and a device, no numbers. What the host
asks of the device past the operators (events, streams) is told to ``LISTENERS``.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import shutil
import subprocess
import tempfile
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from support.ranks import Call, Case, Ranks, in_a_fork

SOURCE = Path(__file__).with_name("noop_cuda.cpp")


@dataclass
class Machine:
    """What the device claims to be; ``arch`` is that of a ROCm device, ``memory`` in bytes."""

    capability: tuple[int, int] = (9, 0)
    count: int = 1
    name: str = "NVIDIA H100 80GB HBM3"
    memory: int = 80 * 10**9
    arch: str = ""

    def become(self, other: Mapping[str, Any]) -> None:
        """Take the fields of another; one with an ``arch`` is a build of torch for ROCm."""
        vars(self).update(other)
        torch.version.hip, torch.version.cuda = ("6.4", None) if self.arch else (None, "12.8")


MACHINE = Machine()
#: told of what the host asked of the device, and of which event; a name in ``WAITS`` stops the host until it is done
LISTENERS: list[Callable[[str, Any], None]] = []
WAITS = ("event.synchronize", "stream.synchronize", "cuda.synchronize")


class CannotBuildError(RuntimeError):
    """There is no compiler, or torch's headers do not fit."""


def library() -> Path:
    """The backend for the torch of this Python, built once into the system's temporary folder.

    Raises:
        CannotBuildError: as it says.
    """
    torch_at = Path(torch.__file__).parent
    flags = ["-O1", "-fPIC", "-shared", "-std=c++20", f"-I{torch_at}/include"]
    links = [f"-L{torch_at}/lib", f"-Wl,-rpath,{torch_at}/lib", "-ltorch_cpu", "-lc10", "-D_GLIBCXX_USE_CXX11_ABI=1"]
    parts = (SOURCE.read_bytes(), " ".join([*flags, *links]).encode(), (torch_at / "version.py").read_bytes())
    folder = Path(tempfile.gettempdir()) / f"noop_cuda-{os.getuid()}"
    built = folder / f"{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}.so"
    if built.exists():
        return built
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise CannotBuildError("no g++ or clang++ on the PATH")
    folder.mkdir(mode=0o700, exist_ok=True)
    part = built.with_suffix(f".{os.getpid()}")
    done = subprocess.run(
        [compiler, *flags, str(SOURCE), "-o", str(part), *links], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CannotBuildError(f"{compiler}: {done.stderr.strip()[-600:]}")
    part.replace(built)  # whole, whoever else builds it
    return built


def _tell(what: str, who: Any = None) -> None:
    for listener in LISTENERS:
        listener(what, who)


def _told(name: str, value: Any = None) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        _tell(name)
        return value

    return call


class Event:
    """Never done until it is awaited: what polls must also know how to wait."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        _tell("event.record", self)

    def wait(self, *_: Any) -> None:
        _tell("event.wait", self)

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        _tell("event.synchronize", self)

    def elapsed_time(self, _: Any) -> float:
        return 1.0


class Stream:
    """The one there is."""

    stream_id = device_index = cuda_stream = 0
    device_type = 1
    device: Any

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        _tell("stream.wait_event", event)

    def wait_stream(self, stream: Any) -> None:
        _tell("stream.wait_stream", stream)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _tell("stream.synchronize")

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record()
        return event


class _Here:
    """Of a context that would change the device."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def _properties(*_: Any) -> types.SimpleNamespace:
    major, minor = MACHINE.capability
    return types.SimpleNamespace(
        name=MACHINE.name,
        major=major,
        minor=minor,
        total_memory=MACHINE.memory,
        gcnArchName=MACHINE.arch,
        multi_processor_count=132,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        L2_cache_size=1,
        uuid="0",
        shared_memory_per_multiprocessor=233472,
        shared_memory_per_block_optin=232448,
        is_integrated=0,
    )


def install() -> None:
    """``torch.cuda`` and Lightning's accelerator see ``MACHINE``, whatever it is at the time."""
    # These look at torch while it is as it was built: kernels of Triton and NCCL are not there.
    import lightning.fabric.accelerators.cuda as accelerator
    import lightning.pytorch  # noqa: F401
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.optim import optimizer
    from torch.utils import _foreach_utils
    from torch.utils._python_dispatch import _disable_current_modes

    def generator_state(*_: Any) -> Any:
        with _disable_current_modes():
            return torch.zeros(16, dtype=torch.uint8)

    def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Any:  # torch's own goes around dispatch modes
        if isinstance(data, torch.Tensor):
            return data.to(device=device or data.device, dtype=dtype or data.dtype)
        return torch.tensor(data, dtype=dtype, device=device)

    def supports_bf16(including_emulation: bool = True) -> bool:  # torch's rule; its own tries a tensor
        return bool(torch.version.hip) or MACHINE.capability >= (8, 0) or including_emulation

    def always(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    def count(*_: Any) -> int:
        return MACHINE.count

    # A CUDA build of torch has registered its own guard since this library was preloaded.
    ctypes.CDLL(str(library())).replace_cuda_guard()
    one = Stream()
    Stream.device = torch.device("cuda", 0)
    torch.version.cuda = "12.8"  # while what asks for it is imported
    memory = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    generators = ("set_rng_state", "set_rng_state_all", "manual_seed", "manual_seed_all")
    _set(
        torch.cuda,
        _initialized=True,
        _lazy_init=always(None),
        init=always(None),
        **dict.fromkeys(("is_available", "is_initialized", "_is_compiled"), always(True)),
        is_current_stream_capturing=always(False),
        is_bf16_supported=supports_bf16,
        device_count=count,
        current_device=always(0),
        get_device_properties=_properties,
        get_device_capability=lambda *_: MACHINE.capability,
        get_device_name=lambda *_: MACHINE.name,
        Event=Event,
        Stream=Stream,
        **dict.fromkeys(("device", "device_of", "_DeviceGuard"), _Here),
        **dict.fromkeys(("stream", "current_stream", "default_stream"), always(one)),
        synchronize=_told("cuda.synchronize"),
        **{name: _told(name) for name in ("set_device", "set_stream", "empty_cache", "reset_peak_memory_stats")},
        **{name: _told(name, 0) for name in memory},
        memory_stats=always({}),
        get_rng_state=generator_state,
        get_rng_state_all=always([]),
        **{name: _told(name) for name in generators},
    )
    _set(
        torch._C,
        **dict.fromkeys(("_cuda_setDevice", "_cuda_isCurrentStreamCapturing"), always(None)),
        **dict.fromkeys(("_cuda_getDevice", "_cuda_exchangeDevice", "_cuda_maybeExchangeDevice"), always(0)),
        _cuda_getCurrentRawStream=always(0),
        _cuda_getDeviceCount=count,
    )
    _set(accelerator, num_cuda_devices=count, is_cuda_available=always(True), _clear_cuda_memory=always(None))
    _set(torch, as_tensor=as_tensor)
    _set(torch.Tensor, record_stream=_told("record_stream"))
    # Fakes of "cuda" are made by way of "meta": there is no allocator.
    _set(FakeTensorMode, avoid_device_init=property(always(True)))
    # Fakes stand for torch's own tensors, which multi-tensor operators take.
    for kinds in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        kinds.append(FakeTensor)


def _set(owner: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


#: how long a case may take on a busy machine, and what is imported before the first
SECONDS = 240.0
PRELOADED = ("lightning_mp.callbacks", "lightning_mp.planner", "lightning_mp.planner.predict", "cuda_path.fits")
#: what says that a process was launched or seeded, which these were not
LAUNCHED = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHED += ("TORCHELASTIC_RUN_ID", "PL_GLOBAL_SEED")


class Processes:
    """Runs each case in a fork of one process that imported everything and ran nothing.

    A process that has run a backward pass must not be forked: autograd's threads would be missing. TF32's switches once
    written do not read as never written.
    """

    def __init__(self) -> None:
        self._ranks = Ranks(1, SECONDS, {"LD_PRELOAD": str(library())})
        self.stop = self._ranks.stop

    def run(self, case: Case, machine: Machine | None = None) -> Any:
        """What ``case.run()`` returned on ``machine``; raises RankError where it failed, died or hung."""
        return self._ranks.call(_forked, asdict(machine or Machine()), pickle.dumps(case))[0]

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.run(Call(function, arguments))


def _forked(machine: Mapping[str, Any], case: bytes) -> Any:
    _prepare()
    return in_a_fork(_on, machine, case)


@cache
def _prepare() -> None:
    for name in LAUNCHED:
        os.environ.pop(name, None)
    install()
    for name in PRELOADED:
        import_module(name)


def _on(machine: Mapping[str, Any], case: bytes) -> Any:
    MACHINE.become(machine)
    return pickle.loads(case).run()
