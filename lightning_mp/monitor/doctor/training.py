"""A model that is not in training mode."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lightning_mp.compat.lightning import LightningModule
from lightning_mp.monitor.doctor.case import Case, below, listed, many
from lightning_mp.monitor.findings import Finding

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def eval_mode(case: Case) -> Iterator[Finding]:
    """Modules with trained weights in eval mode: Lightning leaves modes as they are since 2.2."""
    tops: list[tuple[str, nn.Module]] = []
    for name, module in case.modules:
        if module.training or any(below(name, top) for top, _ in tops):
            continue
        # A frozen part belongs in eval mode, and so may a norm whose statistics are to stay.
        alone = bool(name) and "norm" in type(module).__name__.lower() and next(module.children(), None) is None
        if not alone and any(parameter.requires_grad for parameter in module.parameters()):
            tops.append((name, module))
    if not tops:
        return
    names = [name for name, _ in tops]
    root = "self" if isinstance(case.model, LightningModule) else "model"
    one = ".".join(filter(None, (root, names[0]))) if len(names) == 1 else "each"
    yield Finding(
        name="eval_mode",
        severity="warning",
        what=f"in eval mode, with weights that are to be trained: {listed(names)}",
        why=f"{_effect(tops)}; from_pretrained() returns models so, and Trainer.fit leaves modes as they are",
        fix=f"call {one}.train() where the model is made, or before fit",
        where=names[0] or None,
    )


def _effect(tops: list[tuple[str, nn.Module]]) -> str:
    modules = [module for _, top in tops for module in top.modules()]
    drops = sum(isinstance(module, _DROPOUTS) and module.p > 0 for module in modules)
    norms = sum(getattr(module, "running_mean", None) is not None for module in modules)
    said = [f"{many(drops, 'dropout')} without effect"] if drops else []
    said += [f"{many(norms, 'norm')} on running statistics that are not updated"] if norms else []
    return " and ".join(said) or "dropout, batch statistics and transformers' gradient checkpointing are off there"
