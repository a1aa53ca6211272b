"""The facts about a device, and TF32: set whatever was set before, and given back exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lightning_mp.numerics.dtypes import describe, has_tf32, set_tf32
from lightning_mp.policy import hardware


def test_a_cpu() -> None:
    found = describe(torch.device("cpu"))
    native = "native" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "emulated"
    assert found == hardware.Device("cpu", "CPU", None, native, None)
    assert not found.tf32
    for mode in ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"):
        assert hardware.refusal(found, mode) is None


def test_a_device_nobody_knows_is_refused() -> None:
    found = describe(torch.device("meta"))
    assert found.type == "meta"
    assert hardware.refusal(found, "32-true") is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu() -> None:
    found = describe(torch.device("cuda", 0))
    assert found.type == "cuda"
    assert found.name == torch.cuda.get_device_name(0)
    assert found.capability == torch.cuda.get_device_capability(0)
    assert found.memory == torch.cuda.get_device_properties(0).total_memory
    assert (found.bf16 == "native") == (found.capability >= (8, 0))


# ---------------------------------------------------------------------- TF32

BACKENDS = torch.backends

#: every switch of torch 2.9 and newer; older ones have none of them
SWITCHES: dict[str, Any] = {
    "generic": BACKENDS,
    "cuda.matmul": BACKENDS.cuda.matmul,
    "cudnn": BACKENDS.cudnn,
    "cudnn.conv": getattr(BACKENDS.cudnn, "conv", None),
    "cudnn.rnn": getattr(BACKENDS.cudnn, "rnn", None),
    "mkldnn": BACKENDS.mkldnn,
    "mkldnn.matmul": getattr(BACKENDS.mkldnn, "matmul", None),
    "mkldnn.conv": getattr(BACKENDS.mkldnn, "conv", None),
    "mkldnn.rnn": getattr(BACKENDS.mkldnn, "rnn", None),
}
SWITCHES = {name: owner for name, owner in SWITCHES.items() if hasattr(owner, "fp32_precision")}
needs_switches = pytest.mark.skipif(not SWITCHES, reason="this torch has only the older calls")

READERS: dict[str, Callable[[], object]] = {
    "float32_matmul_precision": torch.get_float32_matmul_precision,
    "cuda.matmul.allow_tf32": lambda: BACKENDS.cuda.matmul.allow_tf32,
    "cudnn.allow_tf32": lambda: BACKENDS.cudnn.allow_tf32,
}


def readings() -> dict[str, object]:
    """Every switch, old and new; torch refuses to read an old one where the new ones disagree with it."""
    switches = {name: owner.fp32_precision for name, owner in SWITCHES.items()}
    return switches | {name: _read_or_not(read) for name, read in READERS.items()}


def _read_or_not(read: Callable[[], object]) -> object:
    try:
        return read()
    except RuntimeError:
        return "refuses to be read"


PRISTINE = readings()


def reset() -> None:
    for owner in SWITCHES.values():
        owner.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cudnn.allow_tf32 = True
    for name, owner in SWITCHES.items():
        owner.fp32_precision = PRISTINE[name]


@pytest.fixture(autouse=True)
def _pristine() -> Iterator[None]:
    """Each test begins and ends with the process as it was."""
    assert readings() == PRISTINE
    yield
    reset()
    assert readings() == PRISTINE


def switch(name: str, value: str) -> None:
    SWITCHES[name].fp32_precision = value


OLD: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True),
    "cudnn off": lambda: setattr(BACKENDS.cudnn, "allow_tf32", False),
    "cudnn off, high": lambda: (setattr(BACKENDS.cudnn, "allow_tf32", False), OLD["high"]()),
}
NEW: dict[str, Callable[[], object]] = {
    "matmul tf32": lambda: switch("cuda.matmul", "tf32"),
    "matmul ieee": lambda: switch("cuda.matmul", "ieee"),
    "medium, then matmul ieee": lambda: (OLD["medium"](), switch("cuda.matmul", "ieee")),
    "high, then matmul ieee": lambda: (OLD["high"](), switch("cuda.matmul", "ieee")),
    "everything tf32": lambda: switch("generic", "tf32"),
    "everything ieee": lambda: switch("generic", "ieee"),
    "everything tf32, matmul ieee": lambda: (switch("generic", "tf32"), switch("cuda.matmul", "ieee")),
    "cudnn ieee": lambda: switch("cudnn", "ieee"),
    "cudnn tf32": lambda: switch("cudnn", "tf32"),
    "convolutions ieee": lambda: switch("cudnn.conv", "ieee"),
    "recurrent ieee": lambda: switch("cudnn.rnn", "ieee"),
    "mkldnn bf16": lambda: switch("mkldnn.matmul", "bf16"),
    "mkldnn convolutions tf32": lambda: switch("mkldnn.conv", "tf32"),
}
BEFORE = OLD | (NEW if SWITCHES else {})
SETTINGS = ("highest", "high", "medium")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_tf32_is_set_for_products_and_cudnn_readable_meanwhile_and_restored(
    before: Callable[[], object], setting: str
) -> None:
    before()
    found = readings()
    restore = set_tf32(setting)
    assert torch.get_float32_matmul_precision() == setting
    assert BACKENDS.cuda.matmul.allow_tf32 is (setting != "highest")
    assert BACKENDS.cudnn.allow_tf32 is (setting != "highest")
    if SWITCHES:
        effective = {readings()[name] for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn")}
        assert effective <= {"ieee", "none"} if setting == "highest" else effective == {"tf32"}
    restore()
    assert readings() == found


@needs_switches
def test_the_table_holds_a_state_in_which_torch_cannot_say_its_precision() -> None:
    NEW["matmul tf32"]()
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()


@needs_switches
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("later", ["ieee", "tf32", "none"])
@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_a_switch_that_followed_the_one_above_it_follows_it_again(
    before: Callable[[], object], later: str, setting: str
) -> None:
    """Not visible in any reading at once: ``torch.backends.fp32_precision`` decides for what was never set itself."""
    before()
    switch("generic", later)
    expected = readings()
    reset()
    before()
    set_tf32(setting)()
    switch("generic", later)
    assert readings() == expected


@pytest.mark.parametrize("inner", SETTINGS)
@pytest.mark.parametrize("outer", SETTINGS)
def test_settings_nest(outer: str, inner: str) -> None:
    restore_outer = set_tf32(outer)
    found = readings()
    set_tf32(inner)()
    assert readings() == found
    restore_outer()
    assert readings() == PRISTINE


@pytest.mark.parametrize("device", ["cpu", "meta", "mps"])
def test_only_cuda_has_tf32(device: str) -> None:
    assert has_tf32(torch.device(device)) is False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ampere_and_newer_have_tf32() -> None:
    assert has_tf32(torch.device("cuda", 0)) is (torch.cuda.get_device_capability(0) >= (8, 0))
