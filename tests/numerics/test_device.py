"""The facts about a device, and TF32: set whatever was set before, and given back exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lightning_mp.numerics.device import describe, has_tf32, set_tf32
from lightning_mp.policy import hardware


def test_a_cpu() -> None:
    found = describe(torch.device("cpu"))
    native = "native" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "emulated"
    assert found == hardware.Device("cpu", "CPU", None, native, None)
    assert not found.tf32
    for mode in ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"):
        assert hardware.refusal(found, mode) is None


# ---------------------------------------------------------------------- TF32

BACKENDS = torch.backends

#: every switch
SWITCHES: dict[str, Any] = {
    "generic": BACKENDS,
    "cuda.matmul": BACKENDS.cuda.matmul,
    "cudnn": BACKENDS.cudnn,
    "cudnn.conv": BACKENDS.cudnn.conv,
    "cudnn.rnn": BACKENDS.cudnn.rnn,
    "mkldnn": BACKENDS.mkldnn,
    "mkldnn.matmul": BACKENDS.mkldnn.matmul,
    "mkldnn.conv": BACKENDS.mkldnn.conv,
    "mkldnn.rnn": BACKENDS.mkldnn.rnn,
}

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
BEFORE = OLD | NEW
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
    effective = {readings()[name] for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn")}
    assert effective <= {"ieee", "none"} if setting == "highest" else effective == {"tf32"}
    restore()
    assert readings() == found


@pytest.mark.parametrize("device", ["cpu", "meta", "mps"])
def test_only_cuda_has_tf32(device: str) -> None:
    assert has_tf32(torch.device(device)) is False
