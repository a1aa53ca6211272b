"""What the planner says, as pages: docs/PARALLELISM_GUIDE.md, and the tables of docs/reference/planner.md.

python -m benchmarks.planner_pages      # writes both; tests/planner/test_pages.py holds them to the code
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from lightning_mp.planner import ModelShape, advise, estimate, flops_per_token
from lightning_mp.planner.advise import Choice
from lightning_mp.planner.estimate import of_layout
from lightning_mp.planner.layout import PRECISIONS
from lightning_mp.planner.memory import HELD, bytes_per_parameter
from lightning_mp.planner.runs import Run, published
from lightning_mp.planner.speed import SPREAD, bubble, data_bytes, fit, predicted, spread
from lightning_mp.policy.hardware import GPUS

DOCS = Path(__file__).parents[1] / "docs"
#: between these two lines of docs/reference/planner.md everything is written here
MARKS = ("<!-- written by benchmarks/planner_pages.py -->", "<!-- as far as here -->")
GIB = 2**30
SHARDED = ("ddp", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "fsdp2")
EXAMPLES = (
    (125e6, "rtx3090-24", 1),
    (125e6, "t4-16", 4),
    (1.3e9, "a100-40", 8),
    (7e9, "v100-32", 8),
    (7e9, "a100-80", 8),
    (7e9, "h100-80", 8),
    (13e9, "h100-80", 16),
    (33e9, "h100-80", 32),
    (70e9, "h100-80", 64),
    (175e9, "h100-80", 256),
    (405e9, "h100-80", 512),
    (405e9, "b200-180", 512),
)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


# ---------------------------------------------------------------------- the guide


def guide() -> str:
    """docs/PARALLELISM_GUIDE.md."""
    return "\n".join([_HEAD, _bytes(), _reach(), _examples(), _traffic(), _rules()]).rstrip() + "\n"


_HEAD = """# Which precision, which strategy, which degrees

You know the model and the GPUs. This page says how to split the run. `python -m benchmarks.planner_pages` writes it
from the code that `lightning-mp advise` runs. [How good the planner is](reference/planner.md) compares its figures
with published runs.

1. **Precision.** GPUs with bf16 (Ampere and newer): `bf16-mixed`. Without (V100, T4): `16-mixed`, with loss scaling.
   Under 100M parameters that fit easily: `32-true` with TF32. fp8 (Hopper, Ada and newer) only if you ask for it.
2. **Does a whole copy fit on one GPU**, activations included? Use `ddp`. It sends least, once a step.
3. **If not, shard** with `fsdp2`. Use selective or full checkpointing before more GPUs.
4. **If a micro-batch of one still does not fit, or gathering takes longer than computing**, add tensor parallelism
   within a node with NVLink: 2 before 4 before 8. Avoid it over PCIe.
5. **If the network between nodes is slow** (Ethernet, no InfiniBand), use `hsdp` where one node holds the model. Else
   use pipeline stages across nodes, with four micro-batches a stage or more.
6. **If nothing fits**, use more GPUs: `advise` says how many. Offload is the last choice: PCIe and the CPU limit it.
"""


def _bytes() -> str:
    groups: dict[tuple[object, ...], list[str]] = {}
    for mode in PRECISIONS:
        held = (*HELD[mode], *(f"{bytes_per_parameter(mode, name, ranks):.4g}" for name, ranks in _COLUMNS))
        groups.setdefault(held, []).append(f"`{mode}`")
    rows = [[", ".join(modes), *held] for held, modes in groups.items()]
    head = ["mode", "weights", "gradients", "AdamW", *(f"{_SHORT[name]} x {ranks}" for name, ranks in _COLUMNS)]
    return (
        "## Bytes a parameter\n\nWhat each rank holds at the step, with AdamW's state, by strategy and data-parallel "
        "ranks. `fsdp1` is as `fsdp2`.\n`hsdp` is as `fsdp2` on the ranks of one node. Tensor parallelism divides all "
        "of it. DeepSpeed's ranks hold their\npart of the weights twice ([measured](reference/strategies.md"
        "#bytes-a-parameter)). DDP's buckets, gathered units and\nactivations come on top. ZeRO-3 refuses weights "
        "that are stored in half precision.\n\n" + table(head, rows)
    )


_COLUMNS = [(name, 8) for name in SHARDED] + [("fsdp2", 64)]
_SHORT = dict(zip(SHARDED, ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2"), strict=True))


def _reach() -> str:
    words = ("t4-16", "rtx3090-24", "a100-40", "h100-80", "h200-141", "b200-180")
    sizes = (125e6, 350e6, 760e6, 1.3e9, 2.7e9, 7e9, 13e9, 33e9, 70e9)

    def largest(word: str, strategy: str, gpus: int) -> str:
        mode = "bf16-mixed" if GPUS[word].device.bf16 == "native" else "16-mixed"
        fits = [size for size in sizes if _fits(size, word, strategy, gpus, mode)]
        return f"{fits[-1] / 1e9:.3g}B" if fits else "none"

    rows = [[f"`{word}`", *(largest(word, *column) for column in _REACHES)] for word in words]
    head = ["GPU", *(f"`{name}` on {gpus}" for name, gpus in _REACHES)]
    text = "## What fits at most\n\nThe largest of the usual sizes, 2048 tokens, micro-batch 1, full checkpointing.\n\n"
    return text + table(head, rows)


_REACHES = [("ddp", 8), ("fsdp2", 8), ("fsdp2", 64)]


def _fits(size: float, word: str, strategy: str, gpus: int, mode: str) -> bool:
    return estimate(
        ModelShape.of_size(size), gpu=word, gpus=gpus, strategy=strategy, precision=mode, checkpointing="full"
    ).fits


def _row(size: float, word: str, gpus: int, best: Choice) -> list[object]:
    degrees = f"{best.data} x {best.tensor} x {best.pipeline}"
    low, mid, high = best.tokens_per_s
    days = best.estimate.days()[1]
    return [
        f"{size / 1e9:.3g}B", f"{gpus} x `{word}`", f"`{best.precision}`", f"`{best.strategy}`", degrees,
        best.checkpointing, best.micro_batch, f"{best.memory_bytes / GIB:.0f}",
        f"{mid:,.0f} ({low:,.0f} to {high:,.0f})", f"{days:,.3g}",
    ]  # fmt: skip


def _examples() -> str:
    rows = [
        _row(size, word, gpus, advise(ModelShape.of_size(size, seq_len=4096), gpu=word, gpus=gpus).best)
        for size, word, gpus in EXAMPLES
    ]
    head = ["model", "GPUs", "precision", "strategy", "degrees", "recomputed", "batch", "GiB", "tokens/s a GPU", "days"]
    return (
        "## Examples from 125M to 405B\n\n4096 tokens, nodes of 8 with NVLink. Degrees are data x tensor x "
        "pipeline, *batch* is the micro-batch, *days* are for\n20 tokens a parameter. `lightning-mp advise` "
        "also prints the other choices, and why they lost.\n\n" + table(head, rows)
    )


def _traffic() -> str:
    shape = ModelShape.of_size(7e9)
    groups: dict[tuple[float, float], list[str]] = {}
    for name in SHARDED:
        groups.setdefault(data_bytes(estimate(shape, gpu="h100-80", gpus=8, strategy=name).layout), []).append(name)
    rows = [
        [", ".join(f"`{name}`" for name in names), f"{sent[0]:g}", f"{sent[1]:g}"] for sent, names in groups.items()
    ]
    head = ["strategy", "every micro-batch", "every optimizer step"]
    return (
        "## What is sent\n\nBytes a parameter that each rank sends under `bf16-mixed`, times (n - 1)/n. Gradients are "
        "reduced in fp32. Weights\nare gathered in bf16 for forward, and again for backward.\n\n"
        + table(head, rows)
        + "\n`hsdp` sends the same as `fsdp2` within a node, and 8 bytes over the number of its GPUs across nodes, "
        "once a step.\nTensor parallelism sends 4 all-reduces of the activations a layer and micro-batch (6 under full "
        "checkpointing), and\nwaits for each. Data parallelism sends while it computes: the longer of the two counts. "
        "Pipeline stages wait for\n(p - 1)/(m + p - 1) of a step: "
        f"{bubble(4, 8):.0%} for 4 stages and 8 micro-batches, {bubble(4, 32):.0%} for 32.\n"
    )


def _run(model: str, note: int, **layout: object) -> Run:
    return [
        run
        for run in published()
        if run.model == model and all(getattr(run.layout, name) == value for name, value in layout.items())
    ][note]


def _rules() -> str:
    alone = _run("llama3.1-8b", 1, gpus=8, precision="bf16-mixed")
    split = _run("llama3.1-8b", 0, tensor=8)
    fp8 = _run("llama3.1-8b", 0, gpus=8, precision="fp8-mixed", checkpointing="selective")
    plain, interleaved = _run("llama3.1-405b", 0, gpus=512), _run("llama3.1-405b", 1, gpus=512)
    attention = flops_per_token(alone.shape) / (6 * alone.shape.params) - 1
    said = [f"{predicted(run.shape, run.layout):,.0f}" for run in (alone, split)]
    rules = {
        "6 FLOPs a parameter and token": f"without attention: {attention:.0%} more for 8B at 8192 tokens",
        "tensor parallelism is for speed": "it is for memory: 8B, tensor=8, "
        f"{alone.tokens_per_s:,.0f} to {split.tokens_per_s:,.0f} a GPU ({said[0]} to {said[1]} predicted)",
        "fp8 is 2 to 4 times faster": f"measured {fp8.tokens_per_s / alone.tokens_per_s:.2f} times for 8B on 8 H100",
        "the bubble is what a pipeline costs": "in part: 405B, interleaved stages gave "
        f"{interleaved.tokens_per_s / plain.tokens_per_s:.2f} times the speed of 1F1B",
    }
    return "## Where the usual rules hold\n\n" + table(["rule", "measured runs, tokens/s"], rules.items())


# ---------------------------------------------------------------------- coverage


def coverage() -> str:
    """The tables of docs/reference/planner.md."""
    rows, memory = _speed(), _memory_errors()
    return (
        "Tokens/s, each model left out of the fit in turn; the range is the middle times and over "
        f"{math.sqrt(SPREAD):.2f} (high/low {SPREAD:g}).\n\n"
        + table(["runs", "count", "inside the range", "median error", "worst"], rows)
        + f"\nMemory by the formula is off by {median(map(abs, memory)):.0%} in the median of {len(memory)} runs, by "
        f"{min(memory):+.0%} to {max(memory):+.0%} at the ends.\n"
    )


def _speed() -> list[list[object]]:
    half = [run for run in published() if run.layout.precision != "16-mixed"]
    cells: list[tuple[Run, float]] = []
    for model in dict.fromkeys(run.model for run in half):
        fitted = fit(run for run in half if run.model != model)
        cells += [(run, predicted(run.shape, run.layout, fitted)) for run in half if run.model == model]
    groups: dict[str, list[tuple[Run, float]]] = {"all bf16 and fp8": cells}
    for cell in cells:
        where = f"{cell[0].source.split('@')[0]}, {cell[0].layout.gpu.word}, `{cell[0].layout.precision}`"
        groups.setdefault(where, []).append(cell)
    return [[name, len(group), *_errors(group)] for name, group in groups.items()]


def _error(cell: tuple[Run, float]) -> float:
    return abs(math.log(cell[0].tokens_per_s / cell[1]))


def _errors(group: list[tuple[Run, float]]) -> list[str]:
    inside = [spread(mid, SPREAD).low <= run.tokens_per_s <= spread(mid, SPREAD).high for run, mid in group]
    errors = [math.expm1(_error(cell)) for cell in group]
    return [f"{sum(inside) / len(inside):.1%}", f"{median(errors):.1%}", f"{max(errors):.0%}"]


def _memory_errors() -> list[float]:
    return [
        of_layout(run.shape, run.layout).memory_bytes / GIB / run.memory_gib - 1
        for run in published()
        if run.memory_gib is not None
    ]


def with_tables(page: str) -> str:
    """``page`` with its tables as they are now."""
    before, _, rest = page.partition(MARKS[0])
    return f"{before}{MARKS[0]}\n\n{coverage()}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def main() -> None:
    """Write both."""
    (DOCS / "PARALLELISM_GUIDE.md").write_text(guide(), encoding="utf-8")
    page = DOCS / "reference" / "planner.md"
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
