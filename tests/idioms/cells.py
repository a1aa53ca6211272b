"""What each cell of the table ends in, and whether that is what is expected."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from idioms import host
from idioms.table import IDIOMS, Idiom
from support.comparing import eps, same
from support.ranks import Ranks

#: of each rank
Results = list[dict[str, Any]]
#: the files of the table
THEMES = ("hooks", "reads", "assigns", "optimizing", "callbacks", "manual", "building", "saving", "feeding")
for theme in THEMES:
    import_module(f"idioms.{theme}")
#: a sum of shards is a sum in another order
SHARDED_TOLERANCE = 1e-4
#: under true modes ZeRO-2 steps fp32 masters, and stock the half weights, which rounds every step
ZERO_MASTERS = 8


def ran(name: str, strategy: str, mode: str, folder: str, stock: bool) -> dict[str, Any]:
    """Run one cell in this process; see :func:`idioms.host.ran`."""
    return host.ran(IDIOMS[name].run, strategy, mode, folder, stock)


def tolerance(entry: Idiom, strategy: str, mode: str) -> float:
    """Return how far a cell may be from stock: not at all where the same operations run."""
    if strategy == "zero2" and mode == "bf16-true":
        return ZERO_MASTERS * eps(mode)
    if strategy in ("fsdp2", "zero2"):
        return max(SHARDED_TOLERANCE, eps(mode))
    return eps(mode) if entry.of(entry.rounded, strategy, mode) else 0.0


@dataclass(frozen=True)
class Verdict:
    """What a cell ended in, and why.

    ``equal``: as under stock. ``refused``: with the words that the table has. ``differs``, ``finding``: as the
    table has it. Any other word is not what the table says: ``DIFFERS``, ``REFUSED``, ``FAILED``, ``STOCK FAILED``,
    ``RAN`` in place of a refusal, ``EQUAL`` in place of a difference, ``MENDED`` in place of a finding.
    """

    word: str
    why: str = ""


def verdict(ranks: Ranks, name: str, strategy: str, mode: str, folder: Path) -> Verdict:
    """Run a cell under its plan and under stock Lightning, and return what it ended in."""
    entry = IDIOMS[name]
    planned = ranks.call(ran, name, strategy, mode, str(folder / f"{name}-{strategy}-{mode}-plan"), False)
    refusal = entry.of(entry.refused, strategy, mode)
    if refusal is not None:
        return _as_refused(planned, refusal)
    stock = ranks.call(ran, name, strategy, mode, str(folder / f"{name}-{strategy}-{mode}-stock"), True)
    ended = _unplanned_end(planned, stock) or _compared(entry, planned, stock, strategy, mode)
    finding = entry.of(entry.findings, strategy, mode)
    if finding is None or ended.word == "STOCK FAILED":
        return ended
    return Verdict("MENDED", finding) if ended.word == "equal" else Verdict("finding", ended.why)


def _as_refused(planned: Results, refusal: str) -> Verdict:
    """Return whether every rank was refused with these words."""
    for each in planned:
        said = each.get("message")
        if said is None:
            return Verdict("RAN", refusal)
        if refusal.lower() not in said.lower():
            return Verdict("REFUSED", each.get("failed", said))
    return Verdict("refused", planned[0]["message"])


def _unplanned_end(planned: Results, stock: Results) -> Verdict | None:
    """Return the first exception of a rank, or None."""
    for mine, theirs in zip(planned, stock, strict=True):
        if "message" in theirs:
            return Verdict("STOCK FAILED", f"{theirs['message']}\nwith the plan: {mine.get('message', 'it ran')}")
        if "message" in mine:
            word = "REFUSED" if "refused" in mine else "FAILED"
            return Verdict(word, mine.get("failed", mine["message"]))
    return None


def _compared(entry: Idiom, planned: Results, stock: Results, strategy: str, mode: str) -> Verdict:
    """Return whether every rank ended as under stock Lightning."""
    within = tolerance(entry, strategy, mode)
    pairs = zip(planned, stock, strict=True)
    apart = "\n".join(differences(mine, theirs, within) for mine, theirs in pairs).strip()
    expected = entry.of(entry.differs, strategy, mode)
    if expected is not None:
        return Verdict("differs", apart) if apart else Verdict("EQUAL", expected)
    if apart:
        return Verdict("DIFFERS", apart)
    return Verdict("equal", "; ".join(set(planned[0]["said"]) - set(stock[0]["said"])))


def differences(mine: dict[str, Any], theirs: dict[str, Any], within: float) -> str:
    """Return what is apart, in words, or an empty string."""
    parts = []
    for key in ("losses", "seen", "metrics", "global_step", "predicted"):
        if not same(mine.get(key), theirs.get(key), within):
            parts += [f"{key}: {mine.get(key)} for {theirs.get(key)}"]
    if mine["weights"].keys() != theirs["weights"].keys():
        return "\n".join([*parts, f"names: {mine['weights'].keys() ^ theirs['weights'].keys()}"])
    for name, weight in mine["weights"].items():
        other = theirs["weights"][name]
        if not same(weight, other, within):
            distance = (weight.double() - other.double()).abs().max().item()
            parts.append(f"{name} {weight.dtype} {other.dtype}: {distance:.3g} apart")
    return "\n".join(parts)
