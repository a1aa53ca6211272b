"""What a plan costs and buys on a GPU, in thirteen minutes at most: ``python -m benchmarks.gpu --out DIR [--quick]``.

Each part is a process of its own, whose figures are on disk as they come: one that fails costs the others nothing.
"""

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness import MODES, WARM_UP, StepTimes, fit, interleaved, plan, quietly, stock
from benchmarks.planner_pages import table
from lightning_mp import FP8, MixedPrecisionPlan
from lightning_mp.numerics.dtypes import describe
from lightning_mp.policy import hardware

ROOT = Path(__file__).resolve().parents[1]
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
_LLAMA = {"num_key_value_heads": 8, "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 2048}
#: kind, rows and sizes. With four layers of Llama 3 8B's shapes instead of 32, weights and optimizer state leave room
#: on any 80 GiB
MODELS: dict[str, tuple[str, int, dict[str, int]]] = {
    "gpt2": ("gpt2", 8, {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}),
    "llama 1.1B": ("llama", 8, {**_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}),
    "llama 8B": ("llama", 4, {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4}),
}
#: by how much a smoke run's sizes are smaller, and the least they are
SMALLER, LEAST = 64, 2
Figures = Iterator[tuple[str, dict[str, Any]]]


class Decoder(LightningModule):
    """Next-token loss of a model of transformers, AdamW, fused: nothing then waits for the device."""

    def __init__(self, name: str, *, quick: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        kind, rows, sizes = MODELS[name]
        if quick:
            sizes = {key: max(size // SMALLER, LEAST) for key, size in sizes.items()} | {"vocab_size": 256}
            sizes |= {"num_key_value_heads": 1, "num_attention_heads": 2, "n_head": 2}
        config = AutoConfig.for_model(kind, **sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
        self.model: Any = AutoModelForCausalLM.from_config(config).train()
        self.shape = (2 if quick else rows), int(config.max_position_embeddings)
        self.tokens, self.last = self.shape[0] * self.shape[1], torch.zeros(())
        params = sum(parameter.numel() for parameter in self.parameters())
        #: 6 N + 12 L h s, forward and backward, as MosaicML's llm-foundry counts (scripts/train/benchmarking)
        self.flops_per_token = 6 * params + 12 * config.num_hidden_layers * config.hidden_size * self.shape[1]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.last = loss.detach()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    def batches(self, steps: int) -> Any:
        """Random bytes that lie on the device already: no copy is timed."""
        rows = torch.randint(256, (8, *self.shape), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        return DataLoader([rows[number % 8] for number in range(steps)], batch_size=None)  # pyright: ignore


def run(module: Decoder, plugin: Any, steps: int, **more: Any) -> list[float]:
    times = StepTimes()
    fit(module, module.batches(steps), plugin, steps, callbacks=[times], **more)
    return times.seconds


def measured(module: Decoder, made: MixedPrecisionPlan, steps: int, **more: Any) -> dict[str, Any]:
    """Speed, the most memory and the last loss of one fit."""
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(run(module, made, steps, **more))
    flops = module.flops_per_token * module.tokens / seconds
    peak = hardware.peak(describe(torch.device(DEVICE)), "bf16")
    return {
        "step, ms": round(seconds * 1e3, 2),
        "tokens / s": round(module.tokens / seconds),
        "TFLOP/s": round(flops / 1e12, 2),
        "share of bf16's peak": "-" if peak is None else f"{flops / peak:.1%} of {peak / 1e12:g}",
        "peak, GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if CUDA else "-",
        "last loss": round(float(module.last), 4),
        "skipped": int(made.skipped_steps),
    }


def tests(*, quick: bool) -> Figures:
    """The CUDA tests; among them that nothing waits for the device."""
    import pytest

    folder = ROOT / "tests" / "gpu"
    options = ["-q", "-pno:cacheprovider", "-pno:benchmark", "-oaddopts=--import-mode=importlib", "--maxfail=40"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # a plugin of another package, imported by now
    found = pytest.main([*options, str(folder / "test_steps_gpu.py" if quick else folder)])
    yield "pytest", {"exit status": int(found)}


def ladder(*, quick: bool) -> Figures:
    """The ladder of modes on the same weights and batches, GPT-2 small."""
    rungs: dict[str, MixedPrecisionPlan] = {
        "fp32": plan("32-true", tf32="highest"),
        "tf32": plan("32-true", tf32="high"),
        "fp16": plan("16-mixed"),
        "bf16": plan("bf16-mixed"),
        "bf16 + checkpointing": plan("bf16-mixed", checkpointing="GPT2Block"),
    }
    for name, rung in rungs.items():
        yield name, measured(Decoder("gpt2", quick=quick), rung, WARM_UP + (2 if quick else 35), gradient_clip_val=1.0)


def overhead(*, quick: bool) -> Figures:
    """The plan against stock Lightning, GPT-2 small: ratios of medians, in turn."""
    steps, rounds = (WARM_UP + 2, 1) if quick else (WARM_UP + 15, 4)
    for mode in MODES:
        sides: dict[str, Callable[[], list[float]]] = {
            side.__name__: lambda side=side, mode=mode: run(Decoder("gpt2", quick=quick), side(mode), steps)
            for side in (stock, plan)
        }
        found = interleaved(sides, rounds)
        times = {f"{side}, ms": round(value * 1e3, 2) for side, value in found.items()}
        yield mode, {**times, "plan / stock": round(found["plan"] / found["stock"], 3)}


def compiled(*, quick: bool) -> Figures:
    """Model FLOPs utilisation of a Llama of 1.1B parameters, eager and compiled."""
    for name in ("eager", "compiled"):
        module = Decoder("llama 1.1B", quick=quick)
        if name == "compiled":
            module.model.compile(backend="aot_eager" if quick else "inductor")
        yield name, measured(module, plan("bf16-mixed"), WARM_UP + (2 if quick else 20))


def fp8(*, quick: bool) -> Figures:
    """FP8 by each recipe beside bf16, layers of Llama 8B's shapes, compiled."""
    small: dict[str, Any] = {"small": "convert", "emulate": True} if quick else {}
    recipes: Any = ("tensorwise", "rowwise", "rowwise_gw_hp")
    plans = {name: plan("fp8-mixed", fp8=FP8(recipe=name, **small)) for name in recipes}
    for name, made in {"bf16": plan("bf16-mixed"), **plans}.items():
        module = Decoder("llama 8B", quick=quick)
        for layer in module.model.get_submodule("model.layers"):
            layer.compile(backend="aot_eager" if quick else "inductor")
        found = measured(module, made, WARM_UP + (2 if quick else 15))
        yield name, {**found, "layers in FP8": sum(layer.converted for layer in made.fp8_layers)}


#: in order of importance, and the seconds each may take
PARTS: dict[str, tuple[Callable[..., Figures], int]] = {
    "tests": (tests, 240), "ladder": (ladder, 90), "overhead": (overhead, 150), "mfu": (compiled, 150),
    "fp8": (fp8, 150),
}  # fmt: skip


def _part(name: str, file: Path, *, quick: bool) -> None:
    if not CUDA and not quick:
        sys.exit("This part needs a CUDA device. --quick tries it on a CPU, with figures that mean nothing.")
    quietly()
    found: dict[str, Any] = {}
    for row, figures in PARTS[name][0](quick=quick):
        found[row] = figures
        file.write_text(json.dumps(found))


def _in_a_process(name: str, out: Path, *, quick: bool) -> str:
    """A section of the page: the part's figures, and how it failed if it did."""
    written, log, error = out / f"{name}.json", out / f"{name}.log", ""
    written.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), "--part", name, *["--quick"] * quick]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    with log.open("w") as file:
        start = partial(subprocess.run, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            start(command, timeout=PARTS[name][1] * (3 if quick else 1), check=True)
        except subprocess.SubprocessError as failed:
            error = str(failed).rpartition("]' ")[2]
    lines = [f"## {str(inspect.getdoc(PARTS[name][0])).rstrip('.')}", ""]
    rows: dict[str, dict[str, Any]] = json.loads(written.read_text()) if written.exists() else {}
    if rows:
        heads = list(next(iter(rows.values())))
        lines.append(table(["", *heads], [[row, *map(figures.get, heads)] for row, figures in rows.items()]))
    if error:
        said = f"{log.read_text(errors='replace')[-1500:]}\n{error}".strip()
        lines += ["This part did not end well:", "", "```text", said, "```", ""]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 where every part ran to its end."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder for gpu.md, and each part's figures and log")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="tiny models, also on a CPU: the figures mean nothing")
    options = parser.parse_args(arguments)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.part:
        _part(options.part, out / f"{options.part}.json", quick=options.quick)
        return 0
    device = torch.cuda.get_device_name() if CUDA else "no GPU"
    page = f"# On a GPU\n\n{device}, torch {torch.__version__}; written by `python -m benchmarks.gpu`.\n"
    for name in options.parts:
        print(f"{name}: up to {PARTS[name][1]} s", flush=True)
        page += f"\n{_in_a_process(name, out, quick=options.quick)}"
        # after every part: what ends this process early costs the parts that are still to come, nothing else
        (out / "gpu.md").write_text(page)
    return int("did not end well" in page)


if __name__ == "__main__":
    sys.exit(main())
