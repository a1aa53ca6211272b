"""What TF32 is set to in this process, by torch's older calls and its newer switches."""

from collections.abc import Callable
from typing import Any

import torch

BACKENDS: Any = torch.backends
SWITCHES: dict[str, Any] = {
    "generic": BACKENDS, "cuda.matmul": BACKENDS.cuda.matmul, "cudnn": BACKENDS.cudnn,
    "cudnn.conv": BACKENDS.cudnn.conv, "cudnn.rnn": BACKENDS.cudnn.rnn, "mkldnn": BACKENDS.mkldnn,
    "mkldnn.matmul": BACKENDS.mkldnn.matmul, "mkldnn.conv": BACKENDS.mkldnn.conv, "mkldnn.rnn": BACKENDS.mkldnn.rnn,
}  # fmt: skip
READERS: dict[str, Callable[[], object]] = {
    "float32_matmul_precision": torch.get_float32_matmul_precision,
    "cuda.matmul.allow_tf32": lambda: BACKENDS.cuda.matmul.allow_tf32,
    "cudnn.allow_tf32": lambda: BACKENDS.cudnn.allow_tf32,
    "cudnn.flags": lambda: BACKENDS.cudnn.set_flags(_fp32_precision=None),  # all that it may write left out
}


def readings() -> dict[str, object]:
    """Every switch, new and old; torch refuses to read an old one where the new ones disagree with it."""
    switches = {name: owner.fp32_precision for name, owner in SWITCHES.items()}
    return switches | {name: _read_or_not(read) for name, read in READERS.items()}


def _read_or_not(read: Callable[[], object]) -> object:
    try:
        return read()
    except RuntimeError:
        return "refuses to be read"
