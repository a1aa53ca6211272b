"""What is timed and counted: that no step waits, the ladder of modes, overhead, and MFU."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins import Precision

from benchmarks.gpu.models import (
    GPT2_SMALL,
    LLAMA_1B,
    LLAMA_8B_LAYERS,
    TINY,
    TINY_LLAMA,
    Batches,
    Decoder,
    Size,
)
from benchmarks.gpu.part import Figures
from benchmarks.harness import MODES, SCALE, WARM_UP, fit, interleaved, plan, stock
from lightning_mp import FP8, MixedPrecisionPlan
from lightning_mp.numerics.device import describe
from lightning_mp.policy import hardware

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class BlockTime(Callback):
    """Seconds a step from the end of the warm-up to the end: the device is waited for at both ends, nowhere between."""

    def __init__(self, steps: int) -> None:
        self._last, self._start = steps, 0.0
        self.seconds = 0.0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Look at the clock after the warm-up and after the last step."""
        if trainer.global_step == WARM_UP:
            self._start = _clock()
        elif trainer.global_step == self._last:
            self.seconds = (_clock() - self._start) / (self._last - WARM_UP)


class SyncIsAnError(Callback):
    """Makes every operation of a warm training batch that waits for the device an error."""

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """Watch warm batches."""
        if batch_idx >= WARM_UP and DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, *_: Any) -> None:
        """Between batches Lightning may wait."""
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def _clock() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _fit(module: Decoder, size: Size, plugin: Precision | None, steps: int, *callbacks: Callback, **more: Any) -> None:
    warnings.simplefilter("ignore")
    more |= {"accelerator": "gpu" if DEVICE == "cuda" else "cpu", "callbacks": list(callbacks)}
    fit(module, Batches(size, steps, DEVICE), plugin, steps, **more)


def _run(module: Decoder, size: Size, plan: MixedPrecisionPlan, steps: int, **more: Any) -> dict[str, Any]:
    """Speed, the most memory and the last loss of one fit."""
    times = BlockTime(steps)
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    _fit(module, size, plan, steps, times, **more)
    assert module.last is not None
    return {
        "ms": times.seconds * 1e3,
        "tokens_per_s": size.tokens / times.seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else None,
        "loss": float(module.last),
    }


# ---------------------------------------------------------------------- the parts


def sync(figures: Figures, *, quick: bool) -> None:
    """50 warm steps in which nothing may wait for the device, clipping by norm on."""
    size, steps = (TINY, WARM_UP + 2) if quick else (GPT2_SMALL, WARM_UP + 50)
    for mode in ("bf16-mixed", "16-mixed", "32-true", "bf16-true"):
        figures.note(mode, {"steps": steps - WARM_UP, **_waited(mode, size, steps)})


def _waited(mode: str, size: Size, steps: int) -> dict[str, Any]:
    try:
        _fit(Decoder(size), size, plan(mode), steps, SyncIsAnError(), gradient_clip_val=1.0)
    except RuntimeError as error:
        return {"waited": True, "error": str(error)[:300]}
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return {"waited": False}


def ladder(figures: Figures, *, quick: bool) -> None:
    """fp32, TF32, fp16, bf16 on the same weights and batches: speed, memory and the loss each comes to."""
    size, steps = (TINY, WARM_UP + 2) if quick else (GPT2_SMALL, WARM_UP + 35)
    rungs = {
        "fp32": plan("32-true", tf32="highest"),
        "tf32": plan("32-true", tf32="high"),
        "fp16": plan("16-mixed"),
        "bf16": plan("bf16-mixed"),
        "bf16 + checkpointing": plan("bf16-mixed", checkpointing="GPT2Block"),
    }
    for name, rung in rungs.items():
        torch.manual_seed(0)
        module = Decoder(size)
        run = _run(module, size, rung, steps, gradient_clip_val=1.0)
        figures.note(name, {**run, "skipped": rung.skipped_steps})
        del module


def overhead(figures: Figures, *, quick: bool) -> None:
    """Seconds a step of a loop written by hand, of stock Lightning and of the plan, in turn: ratios of medians."""
    size, steps, rounds = (TINY, WARM_UP + 2, 1) if quick else (GPT2_SMALL, WARM_UP + 15, 4)
    for mode in MODES:
        sides = {side: partial(_side, side, size, mode, steps) for side in _SIDES}
        medians = interleaved(sides, rounds)
        ratios = {f"plan/{side}": medians["plan"] / medians[side] for side in ("stock", "loop")}
        figures.note(mode, {**{f"{side}_ms": value * 1e3 for side, value in medians.items()}, **ratios})


def _side(name: str, size: Size, mode: str, steps: int) -> list[float]:
    return [_SIDES[name](Decoder(size), size, mode, steps)]


def _by_hand(module: Decoder, size: Size, mode: str, steps: int) -> float:
    module.to(DEVICE)
    optimizer = module.configure_optimizers()
    scaler = torch.amp.GradScaler(DEVICE, init_scale=SCALE, enabled=mode == "16-mixed")
    half = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(mode)
    start = 0.0
    for number, batch in enumerate(Batches(size, steps, DEVICE)):
        if number == WARM_UP:
            start = _clock()
        with nullcontext() if half is None else torch.autocast(DEVICE, half, cache_enabled=False):
            loss = module.training_step(batch, number)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return (_clock() - start) / (steps - WARM_UP)


def _by_trainer(plugin: Callable[[str], Precision | None]) -> Callable[[Decoder, Size, str, int], float]:
    def run(module: Decoder, size: Size, mode: str, steps: int) -> float:
        times = BlockTime(steps)
        _fit(module, size, plugin(mode), steps, times)
        return times.seconds

    return run


_SIDES: dict[str, Callable[[Decoder, Size, str, int], float]] = {
    "loop": _by_hand,
    "stock": _by_trainer(stock),
    "plan": _by_trainer(plan),
}


def of_peak(flops: float, peak: hardware.Peak | None) -> dict[str, Any]:
    """What share of the device's peak ``flops`` a second are, and whose figure the peak is."""
    if peak is None:
        return {"mfu": None, "peak": None}
    return {"mfu": flops / peak.flops_per_s, "peak": f"{peak.flops_per_s / 1e12:g} TFLOP/s ({peak.source})"}


def mfu(figures: Figures, *, quick: bool) -> None:
    """Tokens a second and MFU of a Llama of 1.1B parameters in bf16-mixed, eager and compiled."""
    size, steps = (TINY_LLAMA, WARM_UP + 2) if quick else (LLAMA_1B, WARM_UP + 20)
    peak = hardware.peak(describe(torch.device(DEVICE)), "bf16")
    for name, backend in {"eager": None, "compiled": "aot_eager" if quick else "inductor"}.items():
        torch.manual_seed(0)
        module, times = Decoder(size), BlockTime(steps)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        if backend is not None:
            module.model.compile(backend=backend)
        _fit(module, size, plan("bf16-mixed"), steps, times)
        rate = size.tokens / times.seconds
        flops = size.flops_per_token(parameters) * rate
        figures.note(
            name,
            {
                "parameters": parameters,
                "ms": times.seconds * 1e3,
                "tokens_per_s": rate,
                "tflops": flops / 1e12,
                **of_peak(flops, peak),
            },
        )
        del module


def fp8(figures: Figures, *, quick: bool) -> None:
    """Steps of layers of Llama 8B's shapes, each block compiled: bf16, and FP8 by each recipe, end to end."""
    size, steps = (TINY_LLAMA, WARM_UP + 2) if quick else (LLAMA_8B_LAYERS, WARM_UP + 15)
    small = {"small": "convert", "emulate": True} if quick else {}
    plans = {"bf16": plan("bf16-mixed")} | {
        recipe: plan("fp8-mixed", fp8=FP8(recipe=recipe, **small))  # pyright: ignore[reportArgumentType]
        for recipe in ("tensorwise", "rowwise", "rowwise_gw_hp")
    }
    for name, rung in plans.items():
        torch.manual_seed(0)
        module = Decoder(size)
        layers: Any = module.model.get_submodule("model.layers")
        for layer in layers:
            layer.compile(backend="aot_eager" if quick else "inductor")
        run = _run(module, size, rung, steps)
        figures.note(name, {**run, "layers": sum(layer.converted for layer in rung.fp8_layers)})
        del module, layers
