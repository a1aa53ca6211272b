"""What the planner says, as pages: docs/PARALLELISM_GUIDE.md, and the tables of docs/planner.md.

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
from lightning_mp.policy.gpus import GPUS

DOCS = Path(__file__).parents[1] / "docs"
#: between these two lines of docs/planner.md everything is written here
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
    return "\n".join([_HEAD, _bytes(), _reach(), _examples(), _traffic(), _bubbles(), _rules()]).rstrip() + "\n"


_HEAD = """# Which precision, which strategy, which degrees

Written by `python -m benchmarks.planner_pages` from the code that `lightning-mp advise` runs; a test holds it to that
code. [The planner](planner.md) says how near its figures are to published runs.

1. **Precision.** bf16 natively (Ampere and newer): `bf16-mixed`. None (V100, T4): `16-mixed`, with loss scaling. Under
   100M parameters that fit easily: `32-true` with TF32. fp8 (Hopper, Ada and newer) only where you ask for it.
2. **Does a whole copy fit on one GPU** with its activations? Then `ddp`: it sends least, once a step.
3. **If not, shard:** `fsdp2`. Selective or full checkpointing before more GPUs.
4. **If a micro-batch of one still does not fit, or gathering takes longer than computing:** tensor parallelism, within
   a node and over NVLink; 2 before 4 before 8. Over PCIe rather not.
5. **If nodes are slow:** `hsdp` (shards in a node, replicas across), where a node holds the model; else pipeline stages
   across nodes, with four micro-batches a stage or more.
6. **If nothing fits:** more GPUs; `advise` names the count. Offload only if you must: PCIe and the CPU bound it.
"""


def _bytes() -> str:
    rows = [
        [f"`{mode}`", *HELD[mode], *(f"{bytes_per_parameter(mode, name, ranks):.4g}" for name, ranks in _COLUMNS)]
        for mode in PRECISIONS
    ]
    head = ["mode", "weights", "gradients", "AdamW", *(f"`{name}` x {ranks}" for name, ranks in _COLUMNS)]
    return (
        "## Bytes a parameter\n\nHeld on each rank at the step, AdamW's state included; by strategy and "
        "data-parallel ranks. `fsdp1` is as `fsdp2`, `hsdp`\nas `fsdp2` on the ranks of one node; tensor parallelism "
        "divides all of it, offloading leaves nothing on the GPU. DeepSpeed's\nranks have their part of the weights "
        "twice, and under stage 1 too their part of the gradients alone\n([measured](strategies.md#bytes-a-parameter))."
        " Beside these come DDP's buckets (the gradients once more, and in fp32\ntoo where they are half), units that "
        "are gathered, and activations. ZeRO-3 refuses weights that are stored in half.\n\n" + table(head, rows)
    )


_COLUMNS = [(name, 8) for name in SHARDED] + [("fsdp2", 64)]


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
    head = ["model", "GPUs", "precision", "strategy", "data x tensor x pipeline", "checkpointing", "micro-batch", "GiB",
            "tokens/s a GPU", "days"]  # fmt: skip
    return (
        "## Examples from 125M to 405B\n\n4096 tokens, nodes of 8 with NVLink; days for 20 tokens a parameter. "
        "`lightning-mp advise` prints what lost, and why.\n\n" + table(head, rows)
    )


def _traffic() -> str:
    shape = ModelShape.of_size(7e9)
    rows: list[list[str]] = []
    for name in SHARDED:
        layout = estimate(shape, gpu="h100-80", gpus=8, strategy=name).layout
        each, once = data_bytes(layout)
        rows.append([f"`{name}`", f"{each:g}", f"{once:g}"])
    head = ["strategy", "every micro-batch", "every optimizer step"]
    return (
        "## What is sent\n\nBytes a parameter that each rank sends under `bf16-mixed`, times (n - 1)/n; gradients are "
        "reduced in fp32, weights\ngathered in bf16 for the forward and again for the backward pass.\n\n"
        + table(head, rows)
        + "\n`hsdp` sends what `fsdp2` does between the GPUs of a node, and across nodes 8 bytes over the number "
        "of those,\na step. Tensor parallelism sends 4 all-reduces of the activations a layer and micro-batch "
        "(6 under full checkpointing),\nand waits for each. Data parallelism's traffic runs beside computation: the "
        "longer counts.\n"
    )


def _bubbles() -> str:
    stages, batches = (2, 4, 8, 16), (4, 8, 16, 32, 64)
    rows = [[f"{p} stages", *(f"{bubble(p, m):.0%}" for m in batches)] for p in stages]
    return "## The pipeline's bubble\n\n(p - 1)/(m + p - 1) of a step, by micro-batches m.\n\n" + table(
        ["", *(f"m = {m}" for m in batches)], rows
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
    one, many = _run("mpt-1b", 0, gpus=128, precision="bf16-mixed"), _run("mpt-1b", 0, gpus=512)
    plain, interleaved = _run("llama3.1-405b", 0, gpus=512), _run("llama3.1-405b", 1, gpus=512)
    attention = flops_per_token(alone.shape) / (6 * alone.shape.params) - 1
    said = [f"{predicted(run.shape, run.layout):,.0f}" for run in (alone, split)]
    rules = {
        "6 FLOPs a parameter and token": f"without attention: {attention:.0%} more for 8B at 8192 tokens",
        "20 tokens a parameter": "a budget, no speed: `--tokens` says another",
        "DDP, then FSDP, then tensor, then pipeline": "holds. Sharding costs little over fast links: "
        f"1B on {one.layout.gpus} to {many.layout.gpus} H100, {one.tokens_per_s:,.0f} to {many.tokens_per_s:,.0f}",
        "tensor parallelism is for speed": "it is for memory: 8B on H100, FSDP to FSDP x 8 tensor, measured "
        f"{alone.tokens_per_s:,.0f} to {split.tokens_per_s:,.0f}, predicted {said[0]} to {said[1]} a GPU",
        "fp8 is 2 to 4 times faster": f"measured {fp8.tokens_per_s / alone.tokens_per_s:.2f} times for 8B on 8 H100",
        "the bubble is what a pipeline costs": "in part: 405B on 512 H100, interleaved stages gave "
        f"{interleaved.tokens_per_s / plain.tokens_per_s:.2f} times the speed of 1F1B",
        "bf16 halves memory": "activations; weights, gradients and AdamW's state stay 16 bytes a parameter",
    }
    return "## Where the usual rules hold\n\n" + table(["rule", "measured runs, tokens/s"], rules.items())


# ---------------------------------------------------------------------- coverage


def coverage() -> str:
    """The tables of docs/planner.md."""
    rows, worst = _speed()
    text = (
        "Tokens/s, each model left out of the fit in turn; the range is the middle times and over "
        f"{math.sqrt(SPREAD):.2f} (high/low {SPREAD:g}).\n\n"
        + table(["runs", "count", "inside the range", "median error", "worst"], rows)
        + "\nThe five worst cells:\n\n"
        + table(["model", "GPUs", "tokens a sequence", "measured", "predicted", "off by"], worst)
    )
    return (
        text
        + "\nMemory by the formula, GiB a GPU:\n\n"
        + table(["model", "GPUs", "layout", "measured", "predicted", "error"], _memory())
    )


def _speed() -> tuple[list[list[object]], list[list[object]]]:
    half = [run for run in published() if run.layout.precision != "16-mixed"]
    cells: list[tuple[Run, float]] = []
    for model in dict.fromkeys(run.model for run in half):
        fitted = fit(run for run in half if run.model != model)
        cells += [(run, predicted(run.shape, run.layout, fitted)) for run in half if run.model == model]
    groups: dict[str, list[tuple[Run, float]]] = {"all bf16 and fp8": cells}
    for cell in cells:
        where = f"{cell[0].source.split('@')[0]}, {cell[0].layout.gpu.word}, `{cell[0].layout.precision}`"
        groups.setdefault(where, []).append(cell)
    rows = [[name, len(group), *_errors(group)] for name, group in groups.items()]
    worst = sorted(cells, key=lambda cell: -_error(cell))[:5]
    return rows, [
        [*_cell(run), f"{run.tokens_per_s:,.0f}", f"{mid:,.0f}", f"{math.exp(_error((run, mid))):.2f} x"]
        for run, mid in worst
    ]


def _error(cell: tuple[Run, float]) -> float:
    return abs(math.log(cell[0].tokens_per_s / cell[1]))


def _errors(group: list[tuple[Run, float]]) -> list[str]:
    inside = [spread(mid, SPREAD).low <= run.tokens_per_s <= spread(mid, SPREAD).high for run, mid in group]
    errors = [math.expm1(_error(cell)) for cell in group]
    return [f"{sum(inside) / len(inside):.1%}", f"{median(errors):.1%}", f"{max(errors):.0%}"]


def _cell(run: Run) -> list[object]:
    layout = run.layout
    degrees = "".join(
        f", {name} {getattr(layout, name)}" for name in ("tensor", "pipeline", "context") if getattr(layout, name) > 1
    )
    return [run.model, f"{layout.gpus} x {layout.gpu.word}{degrees}, `{layout.precision}`", run.shape.seq_len]


def _memory() -> list[list[object]]:
    rows: list[list[object]] = []
    for run in published():
        if run.memory_gib is not None:
            found = of_layout(run.shape, run.layout).memory_bytes / GIB
            name, where, length = _cell(run)
            batch = f"{length} x {run.layout.micro_batch}, {run.layout.checkpointing}"
            rows.append(
                [name, where, batch, f"{run.memory_gib:.1f}", f"{found:.1f}", f"{found / run.memory_gib - 1:+.0%}"]
            )
    return rows


def with_tables(page: str) -> str:
    """``page`` with its tables as they are now."""
    before, _, rest = page.partition(MARKS[0])
    return f"{before}{MARKS[0]}\n\n{coverage()}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def main() -> None:
    """Write both."""
    (DOCS / "PARALLELISM_GUIDE.md").write_text(guide(), encoding="utf-8")
    page = DOCS / "planner.md"
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
