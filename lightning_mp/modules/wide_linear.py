"""A Linear that multiplies half-precision operands and returns the fp32 sums without rounding them."""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_mp.errors import Faults
from lightning_mp.modules.patterns import Swapped, is_plain_linear, original_class


class Wide(NamedTuple):
    """The dtype of a wide Linear's operands, and the device's type."""

    dtype: torch.dtype
    device_type: str


class WideForward(Swapped):
    """Mix-in of a Linear that casts input, weight and bias to a half format, and returns fp32."""

    lmp_state = ("_lmp_wide",)
    _lmp_wide: Wide

    def forward(self, input: Tensor) -> Tensor:
        """Return fp32 of shape (..., out) for ``input`` of shape (..., in)."""
        wide: Wide | None = self.__dict__.get("_lmp_wide")
        if wide is None:
            return cast("Any", super()).forward(input)
        weight, bias = cast("nn.Linear", self).weight, cast("Tensor | None", cast("Any", self).bias)
        with torch.autocast(wide.device_type, enabled=False):
            operands = (None if tensor is None else tensor.to(wide.dtype) for tensor in (input, weight, bias))
            return cast("Any", WideProduct).apply(*operands)


class WideProduct(torch.autograd.Function):
    """``rows @ weight.T + bias`` of half operands, in fp32. The backward multiplies in the half format."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product in fp32.

        On CUDA it is a half product with an fp32 result, elsewhere a product of operands cast to
        fp32.
        """
        ctx.save_for_backward(rows, weight)
        # ROCm's mm refuses out_dtype; a CPU and DTensor (tensor parallel) have no such mm
        if rows.is_cuda and torch.version.hip is None and not hasattr(weight, "to_local"):
            flat = torch.mm(rows.reshape(-1, weight.shape[1]), weight.t(), out_dtype=torch.float32)
            output = flat.reshape(*rows.shape[:-1], weight.shape[0])
            return output if bias is None else output + bias
        return nn.functional.linear(rows.float(), weight.float(), None if bias is None else bias.float())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients in the half format. The output's gradient is cast to it first."""
        rows, weight = ctx.saved_tensors
        wanted, gradient = ctx.needs_input_grad, gradients[0].to(rows.dtype)
        flat = gradient.reshape(-1, weight.shape[0])
        of_weight = flat.t() @ rows.reshape(-1, weight.shape[1]) if wanted[1] else None
        return gradient @ weight if wanted[0] else None, of_weight, flat.sum(0) if wanted[2] else None


def check(name: str, module: nn.Module, pattern: str, faults: Faults) -> None:
    """Add a fault if ``module`` is no plain Linear with an ordinary weight."""
    if not is_plain_linear(module):
        given = f"pin {pattern!r} with accumulate='fp32' on {name!r}, a {original_class(module).__name__}"
        faults.add(given, allowed="a plain nn.Linear", fix="name Linear layers, or leave accumulate out")
