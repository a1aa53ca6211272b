"""What a policy declares, worked out from it and from an untouched model: dtypes, schedule, scales, bytes."""

import re
from functools import cache

from torch import Tensor, nn

from conformance.cells import GROWTH_INTERVAL, INIT_SCALE
from conformance.model import learning_rate, model_of
from conformance.rows import CHECKPOINTED, Row
from conformance.strategies import world

SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
#: gradients are summed in this dtype unless a plan says otherwise
REDUCED = "fp32"


@cache
def _model(row: Row) -> nn.Module:
    return model_of(row)


@cache
def whole(row: Row) -> dict[str, int]:
    """Parameter name → how many numbers it has before anything is sharded."""
    return {f"model.{name}": parameter.numel() for name, parameter in _model(row).named_parameters()}


def trained(row: Row) -> set[str]:
    return {f"model.{name}" for name, parameter in _model(row).named_parameters() if parameter.requires_grad}


def start(row: Row) -> dict[str, Tensor]:
    model = _model(row)
    return {f"model.{name}": tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def stored(row: Row) -> dict[str, str]:
    return {name: row.policy.norm_storage if "norm" in name else row.policy.storage for name in whole(row)}


def computed(row: Row) -> dict[str, str]:
    """Module name → the dtype it computes in: products of linears and attention, a norm's last factor, a look-up."""
    found, policy = {}, row.policy
    for name, module in _model(row).named_modules():
        if isinstance(module, nn.Linear) or name.endswith("self_attn"):
            found[f"model.{name}"] = policy.compute
        elif "norm" in name:  # under autocast the residual stream, and so a norm, is fp32
            found[f"model.{name}"] = "fp32" if policy.mixed else policy.norm_storage
        elif isinstance(module, nn.Embedding):
            found[f"model.{name}"] = policy.storage
    return found


def handed_on(row: Row) -> dict[str, str]:
    """Module name → the dtype of its output: under the true modes a pinned norm returns to what came in."""
    found = {name: dtype for name, dtype in computed(row).items() if not name.endswith("self_attn")}
    return {name: row.policy.storage if "norm" in name else dtype for name, dtype in found.items()}


def calls(row: Row) -> dict[str, float]:
    """Module name → how often its forward begins in a step: once more where its activations are recomputed."""
    again = CHECKPOINTED if row.policy.checkpointing else None
    inside = [name for name, module in _model(row).named_modules() if type(module).__name__ == again]
    leaves = [name for name, module in _model(row).named_modules() if isinstance(module, nn.Linear)]
    return {f"model.{leaf}": 1.0 + any(leaf.startswith(f"{name}.") for name in inside) for leaf in leaves}


def rates(row: Row, attempts: int, skipped: tuple[int, ...] = ()) -> list[float]:
    done = [attempt - sum(step < attempt for step in skipped) for attempt in range(attempts)]
    return [row.stepper.rate * learning_rate(step) for step in done]


def growing_scales(steps: int) -> list[float]:
    return [INIT_SCALE * 2.0 ** ((step + 1) // GROWTH_INTERVAL) for step in range(steps)]


def halved_scales(steps: int, bad: int) -> list[float]:
    return [INIT_SCALE / 2 if step >= bad else INIT_SCALE for step in range(steps)]


#: bytes on a rank of parameters, gradients and optimizer state. S: bytes as stored, P: numbers, N: ranks. ZeRO steps a
#: copy of its partition, and gathers its gradients in fp32; with offload stage 3 accumulates on the device, and steps a
#: copy on the CPU
FORMULAS = {
    "single": "S, S, 2S", "ddp": "S, S, 2S", "ddp@pytorch_lightning": "S, S, 2S", "fsdp2": "S/N, S/N, 2S/N",
    "hsdp": "S, S, 2S (one shard)", "fsdp1": "S/N, S/N, 2S/N", "fsdp2_offload": "S/N, S/N, 2S/N",
    "pipeline": "S/N, S/N, 2S/N (stages of equal size)", "deepspeed_zero1": "S + S/N, 4P/N, 2S/N",
    "deepspeed_zero2": "S + S/N, 4P/N, 2S/N", "deepspeed_zero2_offload": "S + S/N, 4P/N, 2S/N",
    "deepspeed_zero3": "S/N + S/N, 4P/N, 2S/N", "deepspeed_zero3_offload": "S/N + S/N, 4P/N + 4P/N, 2S/N",
}  # fmt: skip


def by_formula(strategy: str, **sizes: float) -> list[float]:
    terms = re.sub(r"(\d)([SP])", r"\1*\2", FORMULAS[strategy].partition(" (")[0]).split(", ")
    return [float(eval(term, dict(sizes))) for term in terms]


def bytes_per_rank(strategy: str, row: Row) -> dict[str, float]:
    as_stored = sum(count * SIZES[stored(row)[name]] for name, count in whole(row).items())
    found = by_formula(strategy, S=as_stored, P=sum(whole(row).values()), N=world(strategy))
    return dict(zip(("parameters", "gradients", "optimizer"), found, strict=True))
