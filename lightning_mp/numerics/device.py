"""What the rules of ``hardware`` need to know, asked of torch."""

from __future__ import annotations

import torch

from lightning_mp.compat import torch as compat
from lightning_mp.policy.hardware import Device


def describe(device: torch.device) -> Device:
    """The facts about ``device`` that decide which precision it can run."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        emulated = torch.cuda.is_bf16_supported(including_emulation=True)
        bf16 = "native" if native else "emulated" if emulated else "none"
        return Device("cuda", properties.name, (properties.major, properties.minor), bf16, properties.total_memory)
    if device.type == "mps":
        return Device("mps", "Apple GPU", None, "native" if torch.backends.mps.is_macos_or_newer(14, 0) else "none")
    if device.type == "cpu":
        return Device("cpu", "CPU", None, "native" if compat.cpu_has(torch.bfloat16) else "emulated")
    return Device(device.type, device.type, None, "none")
