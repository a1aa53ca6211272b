"""The reference: a plain torch loop without Lightning and without a plan, on one device.

It takes each global batch whole, or in the parts that ranks have of it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from conformance import expected
from conformance.model import CLIP, STEPS, batches, loss_of, model_of, next_token, optimizer_for
from conformance.observe import Run
from conformance.rows import Row

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _pin_norms(model: nn.Module, outside: torch.dtype) -> None:
    for name, module in model.named_modules():
        if "norm" in name:
            module.float()
            module.register_forward_pre_hook(lambda module, args: (args[0].float(), *args[1:]))
            module.register_forward_hook(lambda module, args, output: output.to(outside))


def _norm(parameters: list[nn.Parameter]) -> float:
    return float(sum(p.grad.double().pow(2).sum() for p in parameters if p.grad is not None)) ** 0.5


class _Loop:
    def __init__(self, row: Row, parts: int, clip: float) -> None:
        self.clip, self.parts = clip, parts
        self.row, self.run, self.model = row, Run(), model_of(row)
        self.model.to(DTYPES[row.policy.storage])
        if row.policy.pins and not row.policy.mixed:
            _pin_norms(self.model, DTYPES[row.policy.storage])
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer, self.schedule = optimizer_for(row, self.parameters)

    def backward(self, batch: Tensor, scale: float) -> float:
        policy, losses = self.row.policy, []
        self.optimizer.zero_grad()
        for part in batch.chunk(self.parts):
            with torch.autocast("cpu", DTYPES[policy.compute], enabled=policy.mixed, cache_enabled=False):
                loss = loss_of(*next_token(self.model, part))
            (loss * scale / self.parts).backward()
            losses.append(loss.item())
        norm = _norm(self.parameters) / scale
        factor = min(1.0, self.clip / (norm + 1e-6)) / scale
        for gradient in (p.grad for p in self.parameters if p.grad is not None):
            gradient.mul_(factor)
        self._norm_seen = norm
        return sum(losses) / len(losses)

    def step(self, batch: Tensor, scale: float) -> None:
        """One optimizer step; some optimizers ask for the gradient twice."""
        seen: list[float] = []
        rate = float(self.optimizer.param_groups[0]["lr"])

        def closure() -> Any:
            seen.append(self.backward(batch, scale))
            return torch.tensor(seen[-1])

        self.optimizer.step(closure)
        self.schedule.step()
        self.run.losses.append(seen[-1])
        self.run.lrs.append(rate)
        self.run.norms.append(self._norm_seen)


def reference(row: Row) -> dict[int, Run]:
    """What one process is compared with, and two; and how far from it what is right may end."""
    runs = {parts: _train(row, parts) for parts in (1, 2)}
    if not row.declared:
        # another order of the norm's sum is as little as may be different, and half precision makes more of it
        swayed = _train(row, 1, CLIP * (1 + 2 * torch.finfo(torch.float32).eps)).whole
        for run in runs.values():
            run.sway = 5 * max(distances(row, swayed, runs[1].whole).values())
    return runs


def distances(row: Row, ended: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    start = expected.start(row)
    return apart(ended, {name: tensor for name, tensor in wanted.items() if tensor.is_floating_point()}, start)


def apart(
    ended: Mapping[str, Tensor], wanted: Mapping[str, Tensor], start: Mapping[str, Tensor], spacing: float = 0.0
) -> dict[str, float]:
    """By name, in parts of the way it went, or of a tenth of what is usual where it hardly moved.

    As far as ``spacing`` of its own length is no distance.
    """
    went = {name: length(wanted[name], start[name]) for name in wanted}
    usual = (sum(far**2 for far in went.values()) / len(went)) ** 0.5
    off = {name: length(ended[name], wanted[name]) - spacing * length(wanted[name]) for name in wanted}
    return {name: far / (max(went[name], usual / 10) or 1.0) for name, far in off.items()}


def length(one: Tensor, other: Tensor | float = 0.0) -> float:
    return (one.double() - other).pow(2).mean().sqrt().item()


def _train(row: Row, parts: int, clip: float = CLIP) -> Run:
    loop = _Loop(row, parts, clip)
    scales = [expected.INIT_SCALE, *expected.growing_scales(STEPS)] if row.policy.scaled else [1.0] * STEPS
    for step, batch in enumerate(batches()):
        loop.step(batch, scales[step])
    run, model = loop.run, loop.model
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    run.whole = {f"model.{name}": tensor.detach().clone() for name, tensor in tensors.items()}
    return run
