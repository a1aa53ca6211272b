"""The full tables, docs/conformance.txt, and the matrix in one table, docs/reference/conformance.md."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from conformance import expected, judge
from conformance.cells import SAVED_AT
from conformance.families import FAMILIES
from conformance.judge import Verdict
from conformance.matrix import Matrix
from conformance.model import CLIP, ROWS, STEPS
from conformance.rows import FAMILY_ROWS, MODES, PLAN, POLICIES, TABLES
from conformance.strategies import STRATEGIES

PACKAGES = ("torch", "lightning", "deepspeed", "transformers", "peft", "torchao")
DIGITS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
PARTS = ("parameters", "gradients", "optimizer")

HEADER = """# Conformance

`make conformance` wrote these tables: what every policy declares, optimizers and models that people use, under every
strategy, beside a plain torch loop. Nothing here is written by hand.

{cells}: {same} the same, {refused} refused, {other} otherwise; {seconds:.0f} seconds on {cores} cores.
{versions}.

**What ran.** {steps} steps on global batches of {rows} rows, clipped to a norm of {clip}. `single` is one process;
every other strategy is two processes on CPU joined by gloo, each with its half of every global batch; under `pipeline`
each has its half of the layers, and the halves of a batch are its micro-batches. They import
`lightning.pytorch`, or the copy of Lightning named after the `@`. The plain loop is one process without Lightning and
without a plan; beside two ranks it takes each batch in the two parts that they have of it.

**`same`** means that in that cell

- losses, and the norm that gradients are clipped by, are those of the plain loop at every step, within {fp32:.0e} of it
  in `32-true` and {half:.0e} in the other modes;
- parameters are stored and gradients summed over ranks in the declared dtype, ranks have the same weights bit for bit;
- where one rank alone has infinite gradients in one step, all ranks skip it: afterwards weights and optimizer state
  equal those of a run without that batch bit for bit, the learning rate was held, the counters say one skip, and a
  dynamic scale was halved once;
- a run that was saved at step {saved} and taken up again ends with the losses, weights, optimizer state, schedule,
  scale and counters of the one that was not interrupted, bit for bit.

**`refused`** means that it raised, with the reason below, before the first optimizer step. **`DIFFERS`** and
**`FAILED`** are faults: it ran and was not the same, or it ended in another exception.
"""

TOLD = {
    "plan": """
A two-layer Llama of {numbers} parameters from its configuration and fused AdamW. `+pins` keeps the norms in fp32
(`{{"*norm*": "fp32"}}`), `+ckpt` recomputes the decoder layers' activations. `same` means here also that

- linears, norms, embeddings and attention compute and hand on, and optimizer state is kept in the declared dtype, as
  seen operator by operator in the first steps; activations are recomputed where declared and nowhere else;
- parameters, gradients and optimizer state take the bytes of the strategy's formula, within {memory:.0%}.
""",
    "families": """
Two steps of plain SGD: models of transformers and their own losses, torch's own layers, and others, each tiny, with
random weights, in {policies} policies: every mode, with nothing else, with `{{"norms": "fp32"}}`, or with its blocks
recomputed. A GAN is trained by hand, with two optimizers. `same` means here that losses, and all weights and buffers by
the way they went, are those of the plain loop within four roundings of the mode's format, of which a true mode's
weights take one at each step. A number is how many of the policies ended so; `-` are those in which the plain loop
itself raises.
""",
    "optimizers": """
The Llama of the first table. `lamb`, `lion`, `sam` and `wrapper`, which holds an optimizer and steps that, are written
out in `tests/conformance/optimizers.py`; `muon` takes the matrices, and the rest is frozen. `same` means here also that

- all weights and buffers end where the plain loop's do, within {weights:.0%} of the way they went and five times as
  much as the plain loop itself is off where its norm is rounded another way.
""",
    "compiled": """
Five steps of a small language model whose LightningModule or blocks are compiled, by `aot_eager` or inductor, beside
the same five in eager mode: every mode, without pins, with the norms or with all modules pinned to fp32, with and
without recomputed blocks, and with `TrainingHealth` and `PrecisionAudit` (under inductor in FP8 alone). Under fsdp2
`compile=True` calls inductor. `same` means here that losses, gradients and skipped steps are those of the eager run, to
the last bit under `aot_eager` and within 8 roundings of the format under inductor; that no graph breaks, and none is
compiled after the second step, but where the gather of a shard unit lies in what is compiled.
""",
}


def text(matrix: Matrix) -> str:
    notes: dict[str, int] = {}
    lines = [_header(matrix), ""]
    for name, (all_rows, all_columns) in TABLES.items():
        rows = [row for row in all_rows if any(key[1] == row for key in matrix.verdicts)]
        columns = [column for column in all_columns if any((column, row) in matrix.verdicts for row in rows)]
        if rows:
            told = [f"## {name.capitalize()}", "", _told(name), ""]
            of = GROUPS.get(name)
            table = _summary(matrix, columns, rows, notes) if of is None else _grouped(matrix, columns, rows, notes, of)
            lines += [*told, *table, ""]
    lines += [f"{_superscript(number)} {reason}\n" for reason, number in notes.items()]
    lines += ["## Observed", "", *_legend(), ""]
    for strategy in STRATEGIES:
        verdicts = {row: matrix.verdicts[strategy, row] for row in PLAN if (strategy, row) in matrix.verdicts}
        if any(verdict.figures for verdict in verdicts.values()):
            lines += [f"### {strategy}", "", f"Bytes a rank by formula: {expected.FORMULAS[strategy]}.", ""]
            lines += [*_observed(verdicts), ""]
    return "\n".join(lines).rstrip() + "\n"


def _told(table: str) -> str:
    numbers = sum(expected.whole(PLAN["32-true"]).values())
    told = TOLD[table].strip()
    policies = len(FAMILY_ROWS) // len(FAMILIES)
    return told.format(
        policies=policies, numbers=numbers, memory=judge.MEMORY_TOLERANCE, weights=judge.WEIGHTS_TOLERANCE
    )


def _header(matrix: Matrix) -> str:
    words = [verdict.word for verdict in matrix.verdicts.values()]
    same, refused = words.count(judge.SAME), words.count(judge.REFUSED)
    return HEADER.format(
        cells=f"{len(words)} cells",
        same=same,
        refused=refused,
        other=len(words) - same - refused,
        seconds=matrix.seconds,
        cores=matrix.cores,
        saved=SAVED_AT,
        versions=", ".join([f"Python {platform.python_version()}", *map(_version, PACKAGES)]),
        steps=STEPS,
        rows=ROWS,
        clip=CLIP,
        fp32=judge.FP32_TOLERANCE,
        half=judge.HALF_TOLERANCE,
    ).rstrip()


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def _summary(matrix: Matrix, strategies: list[str], rows: list[str], notes: dict[str, int]) -> Iterable[str]:
    yield _row(["", *strategies])
    yield _row(["---"] * (len(strategies) + 1))
    for row in rows:
        found = (matrix.verdicts.get((strategy, row)) for strategy in strategies)
        yield _row([f"`{row}`", *("" if verdict is None else _word(verdict, notes) for verdict in found)])


#: of the tables with many rows, what a row belongs to
GROUPS: dict[str, Callable[[str], str]] = {
    "families": lambda row: FAMILY_ROWS[row].family,
    "compiled": lambda row: row.partition(":")[0],
}


def _grouped(
    matrix: Matrix, strategies: list[str], rows: list[str], notes: dict[str, int], of: Callable[[str], str]
) -> Iterable[str]:
    """A row a family, or a way to compile: how many of its policies ended in which word."""
    yield _row(["", *strategies])
    yield _row(["---"] * (len(strategies) + 1))
    for group in dict.fromkeys(map(of, rows)):
        cells = []
        for strategy in strategies:
            keys = [(strategy, row) for row in rows if of(row) == group]
            words = Counter(_word(matrix.verdicts[key], notes) for key in keys if key in matrix.verdicts)
            cells.append(", ".join(f"{count} {word}" for word, count in words.items()))
        yield _row([f"`{group}`", *cells])


def _word(verdict: Verdict, notes: dict[str, int]) -> str:
    if verdict.word in (judge.SAME, judge.NO_LOOP):
        return verdict.word
    reason = "; ".join(_one_line(reason) for reason in verdict.reasons)
    number = notes.setdefault(reason, len(notes) + 1)
    return f"{verdict.word}{_superscript(number)}"


def _one_line(reason: str) -> str:
    """A refusal whole, a traceback's last line."""
    lines = [line.strip() for line in reason.strip().splitlines()]
    return lines[-1] if any(line.startswith("Traceback") for line in lines) else " ".join(lines)


def _superscript(number: int) -> str:
    return "".join(DIGITS[int(digit)] for digit in str(number))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _legend() -> list[str]:
    return [
        "`loss` and `norm`: the largest relative distance from one device over all steps. `products`: matrix products,",
        "forward and backward. `norms`: what the norms computed in. `reduced`: what gradients were summed over ranks",
        "in, and by which collectives. Bytes on a rank of parameters, gradients and optimizer state: measured / by",
        "formula; S is what the parameters take as stored, P their number, N the number of ranks.",
    ]


def _observed(verdicts: dict[str, Verdict]) -> Iterable[str]:
    heads = ["policy", "loss", "norm", "stored", "products", "norms", "reduced", "state", *PARTS, "ratio"]
    yield _row(heads)
    yield _row(["---"] * len(heads))
    for policy, verdict in verdicts.items():
        figures = verdict.figures
        if "dtypes" not in figures:
            continue
        dtypes = [figures["dtypes"][key] for key in ("stored", "products", "norms", "reduced", "state")]
        yield _row([f"`{policy}`", *(_figure(figures.get(key)) for key in ("loss", "norm")), *dtypes, *_bytes(figures)])


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _bytes(figures: dict[str, dict[str, float]]) -> list[str]:
    measured, formula = figures["measured"], figures["formula"]
    ratio = sum(measured.values()) / sum(formula.values())
    return [*(f"{measured[part]} / {formula[part]:.0f}" for part in PARTS), f"{ratio:.3f}"]


# ---------------------------------------------------------------------- in one table

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FULL = DOCS / "reference" / "conformance.md", DOCS / "conformance.txt"

_SUMMARY = """# Conformance

`make conformance` wrote this page. It trains every mode, with and without pins and activation checkpointing, under
every strategy: 20 steps, in two processes on a CPU. It compares each run with a plain PyTorch loop.

{table}

*same* means: losses, clipping norms and weights are those of the plain loop. Parameters, products, sums and optimizer
state have the declared dtypes. A step that overflows on one rank is skipped on all, and changes nothing. A resumed run
ends bit for bit where the uninterrupted run ends.

*no pins* means: the same without pins, and refused with them. *refused* means: an error before the first optimizer
step, with what to write instead.

The column of optimizers counts runs under `16-mixed`.
That of families counts 71 families of models in every mode: plain, with pinned norms, with recomputed blocks. *-* are
runs in which plain PyTorch itself raises. The column compiled counts runs under `torch.compile`, compared with the same
runs in eager mode.
[The full tables](../conformance.txt) have every cell, the reason of each refusal, and what was observed.
"""


def summary(words: Mapping[tuple[str, str], str]) -> str:
    others = [table for table in TABLES if table != "plan"]
    heads = ["strategy", *(f"`{mode}`" for mode in MODES), *others]
    lines = [_row(heads), _row(["---"] * len(heads))]
    for strategy in STRATEGIES:
        policies = [{n: words[strategy, n] for n, policy in POLICIES.items() if policy.mode == mode} for mode in MODES]
        counts = [_counts(words[strategy, row] for row in TABLES[t][0] if (strategy, row) in words) for t in others]
        lines.append(_row([f"`{strategy}`", *map(_mode, policies), *counts]))
    return _SUMMARY.format(table="\n".join(lines))


def _mode(found: Mapping[str, str]) -> str:
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    plain = {word for name, word in found.items() if not POLICIES[name].pins}
    pinned = {word for name, word in found.items() if POLICIES[name].pins}
    return "no pins" if (plain, pinned) == ({"same"}, {"refused"}) else _counts(found.values())


def _counts(found: Iterable[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in Counter(found).items()) or "-"
