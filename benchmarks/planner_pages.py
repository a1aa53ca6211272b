"""What the planner says, as a page: docs/PARALLELISM_GUIDE.md.

python -m benchmarks.planner_pages      # writes it; tests/planner/test_pages.py holds it to the code
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_mp.planner import ModelShape, advise, estimate
from lightning_mp.planner.advise import Choice
from lightning_mp.planner.estimate import bubble, data_bytes
from lightning_mp.planner.layout import PRECISIONS
from lightning_mp.planner.memory import HELD, bytes_per_parameter
from lightning_mp.policy.hardware import GPUS

DOCS = Path(__file__).parents[1] / "docs"
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


def write_between(page: Path, marks: tuple[str, str], text: str) -> None:
    """Write ``text`` into a page between two marks; what was written of the rest meanwhile stays."""
    before, _, rest = page.read_text(encoding="utf-8").partition(marks[0])
    page.write_text(
        f"{before}{marks[0]}\n\n{text.strip()}\n\n{marks[1]}{rest.partition(marks[1])[2]}", encoding="utf-8"
    )


def guide() -> str:
    """docs/PARALLELISM_GUIDE.md."""
    return "\n".join([_HEAD, _bytes(), _reach(), _examples(), _traffic(), _RULES]).rstrip() + "\n"


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
    days = best.days()[1]
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


#: from tests/planner/published_runs.csv
_RULES = """## Where the usual rules hold

| rule | measured runs, tokens/s |
| --- | --- |
| 6 FLOPs a parameter and token | without attention: 27% more for 8B at 8192 tokens |
| tensor parallelism is for speed | it is for memory: 8B, tensor=8, 6,667 to 4,378 a GPU (7,303 to 4,826 predicted) |
| fp8 is 2 to 4 times faster | measured 1.28 times for 8B on 8 H100 |
| the bubble is what a pipeline costs | in part: 405B, interleaved stages gave 1.28 times the speed of 1F1B |
"""


if __name__ == "__main__":
    (DOCS / "PARALLELISM_GUIDE.md").write_text(guide(), encoding="utf-8")
