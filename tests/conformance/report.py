"""The full tables, docs/conformance.txt, and the matrix in one table, docs/reference/conformance.md."""

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
out in `tests/conformance/optimizers.py`; `muon` takes the matrices, and the rest is frozen. No step of `sam` overflows:
a plan does not check gradients that are taken twice. `same` means here also that

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
    told = {"policies": len(FAMILY_ROWS) // len(FAMILIES), "numbers": sum(expected.whole(PLAN["32-true"]).values())}
    told |= {"memory": judge.MEMORY_TOLERANCE, "weights": judge.WEIGHTS_TOLERANCE}
    for name, (all_rows, all_columns) in TABLES.items():
        rows = [row for row in all_rows if any(key[1] == row for key in matrix.verdicts)]
        columns = [column for column in all_columns if any((column, row) in matrix.verdicts for row in rows)]
        if rows:
            lines += [f"## {name.capitalize()}", "", TOLD[name].strip().format(**told), ""]
            lines += [*_table(["", *columns], _grouped(matrix, columns, rows, notes, GROUPS.get(name))), ""]
    lines += [f"{_superscript(number)} {reason}\n" for reason, number in notes.items()]
    lines += ["## Observed", "", LEGEND, ""]
    for strategy in STRATEGIES:
        verdicts = {row: matrix.verdicts[strategy, row] for row in PLAN if (strategy, row) in matrix.verdicts}
        if any(verdict.figures for verdict in verdicts.values()):
            lines += [f"### {strategy}", "", f"Bytes a rank by formula: {expected.FORMULAS[strategy]}.", ""]
            lines += [*_table(OBSERVED, _observed(verdicts)), ""]
    return "\n".join(lines).rstrip() + "\n"


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


#: of the tables with many rows, what a row belongs to
GROUPS: dict[str, Callable[[str], str]] = {
    "families": lambda row: FAMILY_ROWS[row].family,
    "compiled": lambda row: row.partition(":")[0],
}


def _grouped(
    matrix: Matrix, strategies: list[str], rows: list[str], notes: dict[str, int], of: Callable[[str], str] | None
) -> Iterable[list[str]]:
    """A row each, or one a family or way to compile, with how many of its policies ended in which word."""
    for group in dict.fromkeys(map(of, rows) if of else rows):
        found = [f"`{group}`"]
        for strategy in strategies:
            keys = [(strategy, row) for row in rows if (of(row) if of else row) == group]
            words = Counter(_word(matrix.verdicts[key], notes) for key in keys if key in matrix.verdicts)
            found.append(", ".join(f"{count} {word}" if of else word for word, count in words.items()))
        yield found


def _word(verdict: Verdict, notes: dict[str, int]) -> str:
    if verdict.word in (judge.SAME, judge.NO_LOOP):
        return verdict.word
    reason = "; ".join(map(_one_line, verdict.reasons))
    return f"{verdict.word}{_superscript(notes.setdefault(reason, len(notes) + 1))}"


def _one_line(reason: str) -> str:
    """A refusal whole, a traceback's last line."""
    lines = [line.strip() for line in reason.strip().splitlines()]
    return lines[-1] if any(line.startswith("Traceback") for line in lines) else " ".join(lines)


def _superscript(number: int) -> str:
    return "".join(DIGITS[int(digit)] for digit in str(number))


def _table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> Iterable[str]:
    return (f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


OBSERVED = ["policy", "loss", "norm", "stored", "products", "norms", "reduced", "state", *PARTS, "ratio"]
LEGEND = """\
`loss` and `norm`: the largest relative distance from one device over all steps. `products`: matrix products,
forward and backward. `norms`: what the norms computed in. `reduced`: what gradients were summed over ranks
in, and by which collectives. Bytes on a rank of parameters, gradients and optimizer state: measured / by
formula; S is what the parameters take as stored, P their number, N the number of ranks."""


def _observed(verdicts: dict[str, Verdict]) -> Iterable[list[str]]:
    for policy, figures in ((policy, verdict.figures) for policy, verdict in verdicts.items()):
        if "dtypes" in figures:
            numbers = ["-" if figures.get(key) is None else f"{figures[key]:.1e}" for key in ("loss", "norm")]
            measured, formula = figures["measured"], figures["formula"]
            ratio = sum(measured.values()) / sum(formula.values())
            taken = [f"{measured[part]} / {formula[part]:.0f}" for part in PARTS]
            yield [f"`{policy}`", *numbers, *(figures["dtypes"][key] for key in OBSERVED[3:8]), *taken, f"{ratio:.3f}"]


DOCS = Path(__file__).parents[2] / "docs"
PAGE, FULL = DOCS / "reference" / "conformance.md", DOCS / "conformance.txt"
_SUMMARY = """# Conformance

`make conformance` wrote this page. It trains every mode, with and without pins and activation checkpointing, under
every strategy: 20 steps, in two processes on a CPU. It compares each run with a plain PyTorch loop.

{table}

*same* means: losses, clipping norms and weights equal the plain loop's. Parameters, products, sums and optimizer
state have the declared dtypes. A step that overflows on one rank is skipped on all, and changes nothing. A resumed run
ends bit for bit where the uninterrupted run ends.

*no pins* means: the same without pins, and refused with them. *refused* means: an error before the first optimizer
step, with what to write instead.

The column of optimizers counts runs under `16-mixed`. The column of families counts 71 families of models in every
mode: plain, with pinned norms, with recomputed blocks. *-* marks runs in which plain PyTorch itself raises. The column
compiled counts runs under `torch.compile`, compared with the same runs in eager mode.
[The full tables](../conformance.txt) have every cell, the reason of each refusal, and the observed dtypes.
"""


def summary(words: Mapping[tuple[str, str], str]) -> str:
    others = [table for table in TABLES if table != "plan"]
    heads = ["strategy", *(f"`{mode}`" for mode in MODES), *others]
    rows = list[list[str]]()
    for strategy in STRATEGIES:
        policies = [{n: words[strategy, n] for n, policy in POLICIES.items() if policy.mode == mode} for mode in MODES]
        counts = [_counts(words[strategy, row] for row in TABLES[t][0] if (strategy, row) in words) for t in others]
        rows.append([f"`{strategy}`", *map(_mode, policies), *counts])
    return _SUMMARY.format(table="\n".join(_table(heads, rows)))


def _mode(found: Mapping[str, str]) -> str:
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    plain = {word for name, word in found.items() if not POLICIES[name].pins}
    pinned = {word for name, word in found.items() if POLICIES[name].pins}
    return "no pins" if (plain, pinned) == ({"same"}, {"refused"}) else _counts(found.values())


def _counts(found: Iterable[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in Counter(found).items()) or "-"
