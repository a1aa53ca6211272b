"""The reference of the reference: a plain torch loop without Lightning and without a plan, on the global batch."""

from __future__ import annotations

import torch
from torch import nn

from conformance.model import CLIP, batches, llama, next_token_loss, optimizer_for
from conformance.observe import Run
from conformance.policies import Policy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = 256.0


def _pin_norms(model: nn.Module, outside: torch.dtype) -> None:
    for name, module in model.named_modules():
        if "norm" in name:
            module.float()
            module.register_forward_pre_hook(lambda module, args: (args[0].float(), *args[1:]))
            module.register_forward_hook(lambda module, args, output: output.to(outside))


def _norm(parameters: list[nn.Parameter]) -> float:
    return float(sum(p.grad.double().pow(2).sum() for p in parameters if p.grad is not None)) ** 0.5


def train(policy: Policy) -> Run:
    """Losses, learning rates and gradient norms of 20 steps."""
    model, run = llama(), Run()
    storage, compute = DTYPES[policy.storage], DTYPES[policy.compute]
    model.to(storage)
    if policy.pins and not policy.mixed:
        _pin_norms(model, storage)
    parameters = list(model.parameters())
    optimizer, schedule = optimizer_for(parameters)
    scale = SCALE if policy.scaled else 1.0
    for tokens in batches():
        with torch.autocast("cpu", compute, enabled=policy.mixed, cache_enabled=False):
            loss = next_token_loss(model(input_ids=tokens).logits, tokens)
        optimizer.zero_grad()
        (loss * scale).backward()
        norm = _norm(parameters) / scale
        factor = min(1.0, CLIP / (norm + 1e-6)) / scale
        for parameter in parameters:
            parameter.grad.mul_(factor)
        run.losses.append(loss.item())
        run.lrs.append(optimizer.param_groups[0]["lr"])
        run.norms.append(norm)
        optimizer.step()
        schedule.step()
    return run
