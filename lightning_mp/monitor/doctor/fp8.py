"""What a plan's FP8 does to a model: nothing, no good, or more than was meant."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lightning_mp.compat.torch import is_compiled
from lightning_mp.errors import Faults
from lightning_mp.modules import fp8
from lightning_mp.monitor.doctor.case import Case
from lightning_mp.monitor.findings import Finding
from lightning_mp.policy import FP8

#: how transformers' language models that predict the next token end
_CAUSAL = ("ForCausalLM", "LMHeadModel")


def _rule(case: Case) -> FP8 | None:
    return None if case.policy is None else case.policy.fp8


def converts_nothing(case: Case) -> Iterator[Finding]:
    """A model of which no layer can run in FP8: a run under the plan is refused."""
    rule, faults = _rule(case), Faults()
    if rule is None:
        return
    pinned = [module for _, module in case.modules if id(module) in case.pinned]
    layers, chosen = fp8.select(case.model, rule, pinned, faults)
    if not chosen:
        fault = faults.found[-1]
        yield Finding(
            name="fp8_converts_nothing",
            severity="error",
            what=f"no layer can run in FP8: {'; '.join(fp8.table(layers)) or 'the model has no Linear'}",
            why="fit refuses such a plan, since it would be a bf16 run by another name",
            fix=fault.fix,
        )


def not_compiled(case: Case) -> Iterator[Finding]:
    """FP8 on a GPU without ``torch.compile``."""
    compiles = getattr(getattr(case.strategy, "sharding", None), "compile", False)
    if _rule(case) is None or case.device.type != "cuda" or compiles:
        return
    if not any(is_compiled(module) or type(module).__name__ == "OptimizedModule" for _, module in case.modules):
        yield Finding(
            name="fp8_not_compiled",
            severity="warning",
            what="FP8 on a GPU without torch.compile",
            why="the casts and scales are kernels of their own then, and cost more than the products save",
            fix="compile each block, block.compile(), or write make_strategy('fsdp2', plan, compile=True)",
        )


def tensorwise_is_not_causal(case: Case) -> Iterator[Finding]:
    """One scale a tensor in a model of which each token is to see only those before it."""
    rule = _rule(case)
    causal = next((name for name, module in case.modules if _is_causal(module)), None)
    if rule is not None and rule.recipe == "tensorwise" and causal is not None:
        yield Finding(
            name="fp8_tensorwise_not_causal",
            severity="warning" if rule.evaluate == "fp8" else "info",
            what="recipe='tensorwise' on a causal language model",
            why="one scale for all tokens lets a later one, and other rows of the batch, change a token's logits",
            fix="write FP8(recipe='rowwise'), whose scales belong to a row each",
            where=causal or None,
        )


def _is_causal(module: nn.Module) -> bool:
    return any(cls.__name__.endswith(_CAUSAL) for cls in type(module).__mro__)
