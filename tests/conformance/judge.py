"""Whether what was observed is what the policy declares. Pure: observations in, a verdict with reasons out."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conformance import expected, plain
from conformance.cells import BAD_STEP, SAVED_AT, SHORT, Cell
from conformance.model import CLIP, STEPS
from conformance.observe import Parts, Run
from conformance.rows import Row
from conformance.strategies import MICROBATCHES

SAME, REFUSED, DIFFERS, FAILED = "same", "refused", "DIFFERS", "FAILED"
#: the plain loop itself raises there
NO_LOOP = "-"
FP32_TOLERANCE, HALF_TOLERANCE = 1e-5, 2e-2
MEMORY_TOLERANCE = 0.10
WEIGHTS_TOLERANCE = 1e-2


@dataclass
class Verdict:
    word: str
    #: why it was refused, what differs, or how it failed
    reasons: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return self.word in (SAME, REFUSED, NO_LOOP)


def judge(strategy: str, row: Row, cells: Sequence[Cell], reference: Run | None) -> Verdict:
    ended = [cell for cell in cells if cell.word]
    if ended:
        words = {cell.word for cell in ended}
        if len(words) == 1 and len(ended) == len(cells) and words != {FAILED}:
            return Verdict(ended[0].word, [ended[0].reason])
        reasons = [f"rank {cell.rank} after {cell.steps_begun} steps, {cell.word}: {cell.reason}" for cell in ended]
        return Verdict(FAILED, reasons)
    if reference is None:
        return Verdict(FAILED, ["there is no plain loop to compare with"])
    mains, policy = [cell.runs["main"] for cell in cells], row.policy
    observed = [_of_all_stages(mains)] if strategy == "pipeline" else mains
    figures: dict[str, Any] = {}
    differences = [
        *(_dtypes(row, observed) if row.declared else _stored(row, mains)),
        *_reductions(mains, set() if strategy == "pipeline" else {expected.REDUCED}),
        *_losses(row, mains, reference, figures),
        *_norms(row, mains, reference, figures),
        *_steps("main", row, mains, STEPS, ()),
        *_scales("main", mains, expected.growing_scales(STEPS) if policy.scaled else []),
        *_ranks_agree("main", row, mains),
        *(_skip(row, cells) if "overflow" in cells[0].runs else ()),
        *_resume(row, cells),
    ]
    if row.declared:
        differences += [*_recomputation(row, observed), *_memory(strategy, row, mains, figures)]
        figures["dtypes"] = _summary(observed)
    else:
        differences += _ended_at(row, mains, reference, figures)
    return Verdict(DIFFERS if differences else SAME, differences, figures)


def _dtypes(row: Row, mains: Sequence[Run]) -> Iterator[str]:
    policy = row.policy
    computed, handed_on = expected.computed(row), expected.handed_on(row)
    state = {policy.storage, policy.norm_storage}
    yield from _stored(row, mains)
    for rank, run in enumerate(mains):
        yield from _differing(rank, "computed", computed, run.computed)
        yield from _differing(rank, "handed on", handed_on, run.handed_on)
        if run.backward != {policy.compute}:
            yield f"dtype: rank {rank} ran backward's products in {_list(run.backward)}, not {policy.compute}"
        if run.state != state:
            yield f"dtype: rank {rank} keeps optimizer state in {_list(run.state)}, not {_list(state)}"


def _stored(row: Row, mains: Sequence[Run]) -> Iterator[str]:
    for rank, run in enumerate(mains):
        yield from _differing(
            rank, "is stored", expected.stored(row), {name: {dtype} for name, dtype in run.stored.items()}
        )


def _differing(rank: int, what: str, declared: dict[str, str], seen: dict[str, set[str]]) -> Iterator[str]:
    wrong = [(name, dtype) for name, dtype in declared.items() if seen.get(name) != {dtype}]
    if wrong:
        name, dtype = wrong[0]
        found = _list(seen[name]) if seen.get(name) else "nothing that was seen"
        yield f"dtype: rank {rank}, {name} {what} in {found}, not {dtype}; {len(wrong)} of {len(declared)} differ"


def _of_all_stages(mains: Sequence[Run]) -> Run:
    """What the ranks of a pipeline saw, each of its own layers, once for every micro-batch."""
    merged = Run()
    for run in mains:
        for kind in ("stored", "computed", "handed_on", "backward", "reduced", "state"):
            getattr(merged, kind).update(getattr(run, kind))
        # torch runs a stage once more in the first step, to see shapes
        merged.calls |= {name: float(count // MICROBATCHES) for name, count in run.calls.items()}
    return merged


def _reductions(mains: Sequence[Run], wanted: set[str]) -> Iterator[str]:
    for rank, run in enumerate(mains):
        seen = {dtype for _, dtype in run.reduced}
        if len(mains) > 1 and seen != wanted:
            told = _list(wanted) or "none"
            yield f"dtype: rank {rank} reduced gradients in {_list(seen) or 'nothing'}, not {told}"


def _recomputation(row: Row, mains: Sequence[Run]) -> Iterator[str]:
    for rank, run in enumerate(mains):
        for name, wanted in expected.calls(row).items():
            if run.calls.get(name) != wanted:
                yield f"checkpointing: rank {rank}, {name} ran {run.calls.get(name, 0):g} times a step, not {wanted:g}"
                break


def _list(names: Iterable[str]) -> str:
    return "+".join(sorted(names))


def _summary(mains: Sequence[Run]) -> dict[str, str]:
    run = mains[0]
    linear = {d for name, dtypes in run.computed.items() if "proj" in name or "lm_head" in name for d in dtypes}
    norm = {d for name, dtypes in run.computed.items() if "norm" in name for d in dtypes}
    return {
        "stored": _list(set(run.stored.values())), "products": _list(linear | run.backward), "norms": _list(norm),
        "reduced": _list(f"{dtype} {name}" for name, dtype in run.reduced) or "-", "state": _list(run.state),
    }  # fmt: skip


def tolerance(row: Row) -> float:
    return FP32_TOLERANCE if row.policy.mode == "32-true" else HALF_TOLERANCE


def _deviation(seen: float, wanted: float) -> float:
    return abs(seen - wanted) / abs(wanted) if math.isfinite(seen) else math.inf


def _losses(row: Row, mains: Sequence[Run], reference: Run, figures: dict[str, Any]) -> Iterator[str]:
    means = [sum(losses) / len(mains) for losses in zip(*(run.losses for run in mains), strict=True)]
    if len(means) != len(reference.losses):
        yield f"loss: {len(means)} steps, not {len(reference.losses)}"
        return
    deviations = [_deviation(*pair) for pair in zip(means, reference.losses, strict=True)]
    figures["loss"] = worst = max(deviations)
    if worst > tolerance(row):
        step = deviations.index(worst)
        yield f"loss: {means[step]:.6g} at step {step}, {reference.losses[step]:.6g} in a plain loop ({worst:.1e} off)"


def norm_of(row: Row, parts: Sequence[Parts]) -> float | None:
    """The global norm from every rank's parts; a number that lies on two ranks counts once."""
    whole, total = expected.whole(row), 0.0
    names = {name for part in parts for name in part}
    if names != expected.trained(row):
        return None
    for name in names:
        here = sum(part.get(name, (0, 0.0))[0] for part in parts)
        total += sum(part.get(name, (0, 0.0))[1] for part in parts) * whole[name] / here
    return math.sqrt(total)


def _norms(row: Row, mains: Sequence[Run], reference: Run, figures: dict[str, Any]) -> Iterator[str]:
    if any(run.norms != mains[0].norms for run in mains[1:]):
        yield "norm: the ranks clipped by different norms"
    used, wanted = mains[0].norms, reference.norms
    if len(used) != len(wanted) or None in used:
        yield f"norm: {sum(norm is not None for norm in used)} norms were seen, not {len(wanted)}"
        return
    deviations = [_deviation(*pair) for pair in zip(used, wanted, strict=True)]  # type: ignore[arg-type]
    figures["norm"] = worst = max(deviations)
    if worst > tolerance(row):
        step = deviations.index(worst)
        yield f"norm: clipped by {used[step]:.6g} at step {step}, {wanted[step]:.6g} in a plain loop ({worst:.1e} off)"
    yield from _clipped(row, mains, used)


def _clipped(row: Row, mains: Sequence[Run], used: Sequence[Any]) -> Iterator[str]:
    """Where gradients lie in ``.grad``: their norm before is the one used, after it the clipped one."""
    for when, limit in (("before", math.inf), ("after", CLIP)):
        for step, parts in enumerate(zip(*(getattr(run, when) for run in mains), strict=True)):
            seen, wanted = norm_of(row, parts), min(used[step], limit)
            if seen is not None and _deviation(seen, wanted) > tolerance(row):
                yield f"norm: {when} clipping the gradients' norm was {seen:.6g} at step {step}, not {wanted:.6g}"
                break


def _ended_at(row: Row, mains: Sequence[Run], reference: Run, figures: dict[str, Any]) -> Iterator[str]:
    """Weights and buffers of the first rank are where the plain loop's are, by how far those went."""
    ended, wanted = mains[0].whole, reference.whole
    if missing := wanted.keys() - ended.keys():
        yield f"weights: there is no {min(missing)} at the end, and {len(missing) - 1} others"
        return
    for name, tensor in wanted.items():
        if not tensor.is_floating_point() and not torch.equal(ended[name], tensor):
            yield f"weights: {name} is {ended[name].tolist()} at the end, {tensor.tolist()} in the plain loop"
    off = {n: math.inf if math.isnan(far) else far for n, far in plain.distances(row, ended, wanted).items()}
    name = max(off, key=lambda name: off[name])
    figures["weights"], limit = off[name], WEIGHTS_TOLERANCE + reference.sway
    if off[name] > limit:
        many = sum(far > limit for far in off.values())
        yield f"weights: {name} ended {off[name]:.1e} of its way from the plain loop's; so did {many - 1} others"


def _steps(
    name: str, row: Row, runs: Sequence[Run], attempts: int, skipped: tuple[int, ...], begun: int = 0
) -> Iterator[str]:
    """Counts, flags and the schedule; ``begun``: attempts made before, in the run this one goes on from."""
    counts = attempts - len(skipped), len(skipped)
    flags = [step in skipped for step in range(begun, attempts)]
    rates = expected.rates(row, attempts, skipped)[begun:]
    for rank, run in enumerate(runs):
        if run.counts != counts:
            yield f"counters: {name}, rank {rank} counts (applied, skipped) {run.counts}, not {counts}"
        if run.skipped != flags:
            yield f"skip: {name}, rank {rank}, step_skipped was {run.skipped}, not {flags}"
        # some optimizers keep it in an fp32 tensor
        if len(run.lrs) != len(rates) or any(
            not math.isclose(*pair, rel_tol=1e-6) for pair in zip(run.lrs, rates, strict=True)
        ):
            seen, wanted = ([f"{rate:.4g}" for rate in each] for each in (run.lrs, rates))
            yield f"schedule: {name}, rank {rank}, learning rates were {seen}, not {wanted}"


def _scales(name: str, runs: Sequence[Run], wanted: list[float]) -> Iterator[str]:
    for rank, run in enumerate(runs):
        if run.scales != wanted:
            yield f"scale: {name}, rank {rank}, {run.scales}, not {wanted}"


def _ranks_agree(name: str, row: Row, runs: Sequence[Run]) -> Iterator[str]:
    for parameter, numbers in expected.whole(row).items():
        copies = [run.weights[parameter] for run in runs if parameter in run.weights]
        copies = [copy for copy in copies if copy.numel() == numbers]
        if any(not torch.equal(copy, copies[0]) for copy in copies[1:]):
            yield f"ranks: {name}, {parameter} differs between ranks"
            return


def _skip(row: Row, cells: Sequence[Cell]) -> Iterator[str]:
    """One rank alone overflowed: all skip, and nothing is left of that batch."""
    overflow, clean = ([cell.runs[name] for cell in cells] for name in ("overflow", "clean"))
    yield from _steps("overflow", row, overflow, SHORT, (BAD_STEP,))
    yield from _ranks_agree("overflow", row, overflow)
    yield from _equal("skip", overflow, clean, "a run without that batch")
    if row.policy.scaled:
        dynamic = [cell.runs["dynamic"] for cell in cells]
        yield from _steps("dynamic", row, dynamic, SHORT, (BAD_STEP,))
        yield from _ranks_agree("dynamic", row, dynamic)
        yield from _scales("dynamic", dynamic, expected.halved_scales(SHORT, BAD_STEP))


def _resume(row: Row, cells: Sequence[Cell]) -> Iterator[str]:
    """From the checkpoint on, the run is the one that was not interrupted."""
    mains, resumed = ([cell.runs[name] for cell in cells] for name in ("main", "resumed"))
    yield from _steps("resumed", row, resumed, STEPS, (), begun=SAVED_AT)
    yield from _scales("resumed", resumed, expected.growing_scales(STEPS)[SAVED_AT:] if row.policy.scaled else [])
    yield from _equal("resume", resumed, mains, "the run that was not interrupted")
    for rank, (one, other) in enumerate(zip(resumed, mains, strict=True)):
        if one.losses != other.losses[SAVED_AT:]:
            yield f"resume: rank {rank}, losses differ from those of the run that was not interrupted"


def _equal(what: str, ones: Sequence[Run], others: Sequence[Run], than: str) -> Iterator[str]:
    for rank, (one, other) in enumerate(zip(ones, others, strict=True)):
        yield from _first_unequal(f"{what}: rank {rank}, weights", one.weights, other.weights, than)
        states = [{f"{i}.{k}": v for i, s in enumerate(run.moments) for k, v in s.items()} for run in (one, other)]
        yield from _first_unequal(f"{what}: rank {rank}, optimizer state", states[0], states[1], than)


def _first_unequal(what: str, one: dict[str, Tensor], other: dict[str, Tensor], than: str) -> Iterator[str]:
    if not one or one.keys() != other.keys():
        yield f"{what} {'have other names than ' + than if one else 'was not seen'}"
        return
    unequal = [name for name in one if not torch.equal(one[name], other[name])]
    if unequal:
        pairs = [(one[name].double(), other[name].double()) for name in unequal]
        off = max((a - b).abs().max().item() if a.shape == b.shape else math.inf for a, b in pairs)
        yield f"{what} differ from {than} in {len(unequal)} of {len(one)}, {unequal[0]} first, by up to {off:.1e}"


def _memory(strategy: str, row: Row, mains: Sequence[Run], figures: dict[str, Any]) -> Iterator[str]:
    formula = expected.bytes_per_rank(strategy, row)
    measured = {key: max(run.bytes.get(key, 0) for run in mains) for key in formula}
    figures["measured"], figures["formula"] = measured, formula
    for key, wanted in formula.items():
        if abs(measured[key] / wanted - 1) > MEMORY_TOLERANCE:
            yield f"memory: {key} take {measured[key]} bytes on a rank, the formula says {wanted:.0f}"
