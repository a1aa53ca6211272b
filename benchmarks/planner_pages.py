"""The tables that code writes into the documentation; of its own the planner's, in docs/PARALLELISM_GUIDE.md.

python -m benchmarks.planner_pages      # writes it; tests/planner/test_pages.py holds it to the code
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lightning_mp.planner import ModelShape, advise, estimate
from lightning_mp.planner.estimate import data_bytes
from lightning_mp.planner.memory import HELD, held
from lightning_mp.planner.shape import PRECISIONS
from lightning_mp.policy.hardware import GPUS

DOCS = Path(__file__).parents[1] / "docs"
GUIDE = DOCS / "PARALLELISM_GUIDE.md"
SHARDED = {"ddp": "DDP", "deepspeed_zero1": "ZeRO-1", "deepspeed_zero2": "ZeRO-2", "deepspeed_zero3": "ZeRO-3"}
SHARDED |= {"fsdp2": "FSDP2"}
EXAMPLES = (
    (125e6, "rtx3090-24", 1), (125e6, "t4-16", 4), (1.3e9, "a100-40", 8), (7e9, "v100-32", 8), (7e9, "a100-80", 8),
    (7e9, "h100-80", 8), (13e9, "h100-80", 16), (33e9, "h100-80", 32), (70e9, "h100-80", 64), (175e9, "h100-80", 256),
    (405e9, "h100-80", 512), (405e9, "b200-180", 512),
)  # fmt: skip


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def replaced(page: str, after: str, text: str) -> str:
    """``page`` with ``text``, a table or a paragraph, in place of the first one that begins alike behind a line."""
    before, found, rest = page.partition(f"{after}\n")
    kept, begins, behind = rest.partition("\n|" if text.startswith("|") else f"\n{text[:6]}")
    assert begins, f"no {text[:6]!r} behind {after!r}"
    _, blank, behind = behind.partition("\n\n")
    return f"{before}{found}{kept}\n{text.strip()}\n{blank[1:]}{behind}"


def write(page: Path, after: str, text: str) -> None:
    """The same in a file; what was written of the rest meanwhile stays."""
    page.write_text(replaced(page.read_text(encoding="utf-8"), after, text), encoding="utf-8")


def guide(page: str) -> str:
    """docs/PARALLELISM_GUIDE.md with what the planner says now."""
    for heading, text in _tables():
        page = replaced(page, heading, text)
    return page


def _tables() -> Iterator[tuple[str, str]]:
    columns = [*((name, 8) for name in SHARDED), ("fsdp2", 64)]
    by_row: dict[tuple[object, ...], list[str]] = {}
    for mode in PRECISIONS:
        row = (*HELD[mode], *(f"{sum(held(mode, name, ranks)):.4g}" for name, ranks in columns))
        by_row.setdefault(row, []).append(f"`{mode}`")
    head = ["mode", "weights", "gradients", "AdamW", *(f"{SHARDED[name]} x {ranks}" for name, ranks in columns)]
    yield "## Bytes a parameter", table(head, [[", ".join(modes), *row] for row, modes in by_row.items()])

    reaches = [("ddp", 8), ("fsdp2", 8), ("fsdp2", 64)]
    words = ("t4-16", "rtx3090-24", "a100-40", "h100-80", "h200-141", "b200-180")
    rows = [[f"`{word}`", *(_largest(word, *reach) for reach in reaches)] for word in words]
    yield "## The largest model that fits", table(["GPU", *(f"`{name}` on {gpus}" for name, gpus in reaches)], rows)

    head = ["model", "GPUs", "precision", "strategy", "degrees", "recomputed", "batch", "GiB", "tokens/s a GPU", "days"]
    yield "## Examples from 125M to 405B", table(head, [_example(*example) for example in EXAMPLES])

    sent: dict[tuple[float, float], list[str]] = {}
    for name in SHARDED:
        layout = estimate(ModelShape.of_size(7e9), gpu="h100-80", gpus=8, strategy=name).layout
        sent.setdefault(data_bytes(layout), []).append(f"`{name}`")
    rows = [[", ".join(names), f"{each:g}", f"{once:g}"] for (each, once), names in sent.items()]
    yield "## What is sent", table(["strategy", "every micro-batch", "every optimizer step"], rows)


def _largest(word: str, strategy: str, gpus: int) -> str:
    mode = "bf16-mixed" if GPUS[word].device.bf16 == "native" else "16-mixed"
    given = {"gpu": word, "gpus": gpus, "strategy": strategy, "precision": mode, "checkpointing": "full"}
    sizes = (125e6, 350e6, 760e6, 1.3e9, 2.7e9, 7e9, 13e9, 33e9, 70e9)
    fits = [size for size in sizes if estimate(ModelShape.of_size(size), **given).fits]  # pyright: ignore
    return f"{fits[-1] / 1e9:.3g}B" if fits else "none"


def _example(size: float, word: str, gpus: int) -> list[object]:
    best = advise(ModelShape.of_size(size, seq_len=4096), gpu=word, gpus=gpus).best
    (low, mid, high), (_, days, _) = best.tokens_per_s, best.days()
    return [
        f"{size / 1e9:.3g}B", f"{gpus} x `{word}`", f"`{best.precision}`", f"`{best.strategy}`",
        f"{best.data} x {best.tensor} x {best.pipeline}", best.checkpointing, best.micro_batch,
        f"{best.memory_bytes / 2**30:.0f}", f"{mid:,.0f} ({low:,.0f} to {high:,.0f})",
        f"{days:,.0f}" if days >= 100 else f"{days:.3g}",
    ]  # fmt: skip


if __name__ == "__main__":
    GUIDE.write_text(guide(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
