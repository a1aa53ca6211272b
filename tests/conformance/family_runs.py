"""Two steps of a family under a mode and a strategy, beside the same two steps of a plain torch loop."""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from conformance.cells import is_refusal
from conformance.families import Family
from conformance.judge import DIFFERS, FAILED, REFUSED, SAME, Verdict
from conformance.observe import bits
from conformance.plain import DTYPES, apart
from conformance.rows import MOVE, SCALE, FamilyRow, Policy
from conformance.strategies import plain, trainer_arguments
from lightning_mp.compat.lightning import LightningModule
from lightning_mp.modules.patterns import plain_name
from lightning_mp.numerics.dtypes import default_dtype

STEPS = 2


@dataclass
class Outcome:
    losses: list[list[float]] = field(default_factory=list)
    ended: dict[str, Tensor] = field(default_factory=dict)
    word: str = ""
    reason: str = ""


@dataclass
class Reference:
    """The plain loop's outcome for one process and for two; where weights began; the learning rates."""

    outcomes: dict[int, Outcome]
    start: dict[str, Tensor]
    rates: tuple[float, ...]


def _batches(family: Family) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(3)
    return [(family.batch(generator), family.batch(generator)) for _ in range(STEPS)]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {plain_name(name): tensor for name, tensor in named}


def reference(row: FamilyRow) -> Reference:
    start = {name: _whole(tensor) for name, tensor in _tensors(row.of.model()).items()}
    rates = _rates(row.of)
    outcomes = {parts: _loop(row.of, row.policy, rates, parts) for parts in (1, 2)}
    return Reference(outcomes, start, tuple(rates))


def _rates(family: Family) -> list[float]:
    """For each loss, the rate at which a first step moves its weights by ``MOVE`` of their length."""
    model, rates = family.model(), []
    for name, loss in family.losses.items():
        parameters = [p for p in model.get_submodule(name).parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss(model, _batches(family)[0][0]), parameters, allow_unused=True)
        norms = [nn.utils.get_total_norm([t for t in each if t is not None]) for each in (parameters, gradients)]
        rates.append(float(MOVE * norms[0] / norms[1]))
    return rates


def is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def _pin(module: nn.Module, policy: Policy) -> None:
    forward = module.forward

    def pinned(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = (apply_to_collection(each, Tensor, _to(torch.float32)) for each in (args, kwargs))
        with torch.autocast("cpu", enabled=False), default_dtype(torch.float32):
            output = forward(*args, **kwargs)
        return output if policy.mixed else apply_to_collection(output, Tensor, _to(DTYPES[policy.storage]))

    module.forward = pinned  # type: ignore[method-assign]
    module.float()


def _to(dtype: torch.dtype) -> Any:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def _prepared(family: Family, policy: Policy) -> nn.Module:
    model = family.model()
    if not policy.mixed:
        quantized = [m for m in model.modules() if any(p.element_size() == 1 for p in m.parameters(recurse=False))]
        kept = {id(m) for m in quantized}
        for module in model.modules():
            if id(module) not in kept:
                for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                    tensor.data = _to(DTYPES[policy.storage])(tensor.data)
    for module in list(model.modules()) if policy.pins else ():
        if is_norm(module):
            _pin(module, policy)
    return model


def _loop(family: Family, policy: Policy, rates: Sequence[float], parts: int) -> Outcome:
    model, outcome = _prepared(family, policy), Outcome()
    buffers = [{name: buffer.clone() for name, buffer in model.named_buffers()} for _ in range(parts)]
    scale = SCALE if policy.scaled else 1.0
    for batch in _batches(family):
        lost = []
        for (name, loss), rate in zip(family.losses.items(), rates, strict=True):
            parameters = [p for p in model.get_submodule(name).parameters() if p.requires_grad]
            sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
            seen = []
            for part in range(parts):
                _exchange(model, buffers[part])
                found = _loss(model, loss, batch[part], policy)
                found_gradients = torch.autograd.grad(found * scale, parameters, allow_unused=True)
                _exchange(model, buffers[part])
                seen.append(float(found))
                for total, gradient in zip(sums, found_gradients, strict=True):
                    if gradient is not None:
                        total.add_(gradient.float() / parts)
            lost.append(sum(seen) / parts)
            if not all(total.isfinite().all() for total in sums):
                scale /= 2
                continue
            with torch.no_grad():
                for parameter, total in zip(parameters, sums, strict=True):
                    parameter.sub_((total / scale).to(parameter.dtype), alpha=rate)
        outcome.losses.append(lost)
    outcome.ended = {name: _whole(tensor) for name, tensor in (_tensors(model) | buffers[0]).items()}
    return outcome


def _exchange(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        held = buffer.clone()
        buffer.copy_(buffers[name])
        buffers[name] = held


def _loss(model: nn.Module, loss: Any, batch: Any, policy: Policy) -> Tensor:
    half = DTYPES[policy.compute]
    if policy.mixed:
        with torch.autocast("cpu", half, cache_enabled=False):
            return loss(model, batch)
    with default_dtype(half):
        return loss(model, apply_to_collection(batch, Tensor, _to(half)))


class Learner(LightningModule):
    """Each rank trains on its own batch: automatically on one loss, by hand on several."""

    def __init__(self, family: Family, rates: Sequence[float]) -> None:
        super().__init__()
        self.family, self.rates, self.model = family, rates, family.model()
        self.automatic_optimization = len(family.losses) == 1
        self.losses: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        mine, losses = batch[self.global_rank], list(self.family.losses.values())
        if self.automatic_optimization:
            loss = losses[0](self.model, mine)
            self.losses.append([loss.item()])
            return loss
        self.losses.append([])
        optimizers: Any = self.optimizers()
        for optimizer, each in zip(optimizers, losses, strict=True):
            self.toggle_optimizer(optimizer)
            loss = each(self.model, mine)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses[-1].append(loss.item())
        return None

    def configure_optimizers(self) -> Any:
        parts = [self.model.get_submodule(name) for name in self.family.losses]
        return [torch.optim.SGD(part.parameters(), rate) for part, rate in zip(parts, self.rates, strict=True)]


def run_cell(strategy: str, row: FamilyRow, rates: Sequence[float]) -> Outcome:
    from support.running import fit

    learner, outcome = Learner(row.of, rates), Outcome()
    try:
        arguments = trainer_arguments(strategy, row.plan(), **(row.of.ddp if plain(strategy) == "ddp" else {}))
        data = DataLoader(_batches(row.of), batch_size=None)  # type: ignore[arg-type]
        fit(learner, data=data, **arguments)
        outcome.ended = {name: _whole(tensor) for name, tensor in _tensors(learner.model).items()}
    except Exception as error:
        refused = is_refusal(error) and len(learner.losses) <= 1
        outcome.word = REFUSED if refused else FAILED
        outcome.reason = str(error) if refused else traceback.format_exc()
    outcome.losses = learner.losses
    return outcome


def _whole(tensor: Tensor) -> Tensor:
    """In full, and a copy; numbers of 8 bits as bytes, since fp8 travels between processes no other way."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        local, options = bits(tensor.to_local()), {"shape": tensor.shape, "stride": tensor.stride()}
        tensor = DTensor.from_local(local, tensor.device_mesh, tensor.placements, **options).full_tensor()
    return bits(tensor).clone()


def judge(row: FamilyRow, outcomes: Sequence[Outcome], reference: Reference) -> Verdict:
    words = {outcome.word for outcome in outcomes}
    if words == {REFUSED}:
        return Verdict(REFUSED, [outcomes[0].reason])
    if words != {""}:
        return Verdict(FAILED, [f"rank {r}: {o.reason or 'it ran'}" for r, o in enumerate(outcomes)])
    wanted = reference.outcomes[len(outcomes)]
    differences = [
        *_losses(row, [outcome.losses for outcome in outcomes], wanted.losses),
        *_weights(row, outcomes[0].ended, wanted.ended, reference.start),
    ]
    return Verdict(DIFFERS if differences else SAME, differences)


def _losses(row: FamilyRow, seen: Sequence[list[list[float]]], wanted: list[list[float]]) -> Iterator[str]:
    for step, expected in enumerate(wanted):
        means = [sum(each) / len(seen) for each in zip(*(losses[step] for losses in seen), strict=True)]
        for mean, one in zip(means, expected, strict=True):
            if not abs(mean - one) <= row.tolerance * abs(one):
                yield f"loss: {mean:.6g} at step {step}, {one:.6g} in a plain loop"


def _weights(
    row: FamilyRow, ended: Mapping[str, Tensor], wanted: Mapping[str, Tensor], start: Mapping[str, Tensor]
) -> Iterator[str]:
    if missing := wanted.keys() - ended.keys():
        yield f"weights: there is no {min(missing)} at the end, and {len(missing) - 1} others"
        return
    # weights that are stored in the mode's format are rounded to it at every step
    off = apart(ended, wanted, start, 0.0 if row.policy.mixed else STEPS * row.policy.rounding)
    wrong = [name for name, far in off.items() if not far <= row.tolerance]
    if wrong:
        name = max(wrong, key=lambda name: off[name])
        yield f"weights: {name} ended {off[name]:.1e} of its way from the plain loop's; so did {len(wrong) - 1} others"
