"""The short name of a torch dtype, as reports, tables and findings show it."""

from __future__ import annotations

import torch

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` → ``"fp32"``; every 8-bit float is ``"fp8"``, anything else keeps torch's name."""
    plain = str(dtype).removeprefix("torch.")
    return "fp8" if plain.startswith("float8") else _NAMES.get(dtype, plain)
