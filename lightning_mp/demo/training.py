"""One mode from the first step to the final validation loss, as an ordinary Lightning project would run it."""

from __future__ import annotations

import math
import statistics
import time
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mp.callbacks.precision_audit import PrecisionAudit
from lightning_mp.compat.lightning import Callback, LightningEnvironment, LightningModule, Trainer
from lightning_mp.demo.language_model import CausalLM
from lightning_mp.demo.modes import MODES
from lightning_mp.demo.quiet import quiet
from lightning_mp.demo.records import WARM_UP_STEPS, Job, Reading, Result
from lightning_mp.demo.text_windows import windows
from lightning_mp.monitor import metric_names
from lightning_mp.monitor.run_log import open_folder, write_run
from lightning_mp.numerics.peak_memory import PeakMemory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lightning_mp.demo.shapes import Shape
    from lightning_mp.demo.tokens import Corpus
    from lightning_mp.monitor.run_folder import RunFolder

# Of the run that measures memory: the first ones may be skipped while the loss scale falls.
MOST_MEMORY_STEPS = 12


def train_windows(tokens: NDArray[np.uint16], shape: Shape, steps: int, seed: int) -> Tensor:
    """``steps * batch`` windows (int64) at random places, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    last = tokens.size - shape.context - 1
    starts = torch.randint(0, last + 1, (steps * shape.batch,), generator=generator)
    return windows(tokens, shape.context, step=1)[starts]


def val_windows(tokens: NDArray[np.uint16], shape: Shape) -> Tensor:
    """Windows side by side from the start of the held-out tokens, at most ``val_batches`` batches of them."""
    return windows(tokens, shape.context)[: shape.val_batches * shape.batch]


class GPT2(CausalLM):
    """A GPT-2 of ``shape`` with random weights from ``seed``."""

    def __init__(self, shape: Shape, steps: int, seed: int) -> None:
        # No dropout: its random numbers would differ between devices and hide what the format alone changes.
        config = {
            "vocab_size": shape.rows,
            "n_positions": shape.context,
            "n_layer": shape.layers,
            "n_embd": shape.width,
            "n_head": shape.heads,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            # Shorter, and the loss jumps when the rate peaks; what a mode is then left with is chance, not its format.
            super().__init__("gpt2", config, lr=shape.lr, warmup_steps=max(1, steps // 5))
        self._steps = steps

    def make_schedule(self, optimizer: torch.optim.Optimizer, warm_up: int) -> Any:
        """As every CausalLM's, but the first step has a rate already."""

        def factor(step: int) -> float:
            if step < warm_up:
                return (step + 1) / warm_up
            share = min(1.0, (step - warm_up) / max(1, self._steps - warm_up))
            return 0.1 + 0.45 * (1 + math.cos(math.pi * share))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class Recorder(Callback):
    """Times every step, reads loss and scale after it, passes them on and keeps the run's folder."""

    def __init__(self, plan: Any, job: Job, peak: int, report: Callable[[Reading], None]) -> None:
        self._plan = plan
        self._tokens = job.shape.tokens_per_step
        self._run_dir = job.folder
        self._peak = peak
        self._folder: RunFolder | None = None
        self._report = report
        self._lr = 0.0
        self._start = 0.0
        self.seconds: list[float] = []
        self.val_loss = math.nan

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the folder, and say there what runs."""
        self._folder = open_folder(trainer, self._run_dir, "demo")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the folder."""
        self._end(trainer, "finished")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the folder, with the error in it."""
        self._end(trainer, "failed", exception)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        self._lr = float(trainer.optimizers[0].param_groups[0]["lr"])
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock (reading the loss waits for the device), then read the plan."""
        loss = float(outputs["loss"])
        seconds = time.perf_counter() - self._start
        self.seconds.append(seconds)
        scale = None if self._plan.scaler is None else float(self._plan.scaler.get_scale())
        reading = Reading(batch_idx + 1, loss, scale, int(self._plan.skipped_steps), self._lr, seconds)
        self._write(
            reading.step,
            {
                metric_names.LOSS: reading.loss,
                metric_names.LOSS_SCALE: reading.scale,
                metric_names.SKIPPED_STEPS: reading.skipped,
                metric_names.LR: reading.lr,
                metric_names.TOKENS_PER_S: round(self._tokens / seconds, 1),
            },
        )
        self._report(reading)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the loss on the held-out windows, which is read once, after the last step."""
        self.val_loss = float(trainer.callback_metrics["val/loss"])
        self._write(
            trainer.global_step, {metric_names.VAL_LOSS: self.val_loss, metric_names.MEMORY_PEAK: self._peak / 2**30}
        )

    def _write(self, step: int, values: dict[str, float | None]) -> None:
        if self._folder is not None:
            self._folder.metrics(step, values)

    def _end(self, trainer: Trainer, status: str, error: BaseException | None = None) -> None:
        """What is left of the folder to do; nothing where it could not be opened."""
        if self._folder is not None:
            write_run(self._folder, trainer, status, error)
            self._folder.close("demo")


class Witness(Callback):
    """Notes the dtype in which the first block's first matrix product comes out: what ran, not what was asked for."""

    def __init__(self) -> None:
        self.dtype = "not seen"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch one forward of ``h.0.attn.c_attn``."""

        def note(module: nn.Module, args: Any, output: Tensor) -> None:
            self.dtype = str(output.dtype).removeprefix("torch.")
            handle.remove()

        handle = pl_module.get_submodule("model.transformer.h.0.attn.c_attn").register_forward_hook(note)


def train_mode(job: Job, corpus: Corpus, report: Callable[[Reading], None]) -> Result:
    """Train and validate one mode in this process; ``report`` gets every step, ``job.folder`` the metrics.

    Raises:
        Exception: whatever the training raises; metrics up to there are on disk.
    """
    with quiet():
        # Before the timed run, so that code is loaded and thread pools have worked when that begins.
        with PeakMemory(job.device) as peak:
            _two_steps(job, corpus)
        return _fit(job, corpus, report, peak.bytes)


class _TwoApplied(Callback):
    """Ends a run after two steps that were applied: the second is the first with the optimizer's state in memory."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ask for the end."""
        trainer.should_stop = batch_idx + 1 - self._plan.skipped_steps >= 2


def _two_steps(job: Job, corpus: Corpus) -> None:
    plan, most = MODES[job.mode].plan(), MOST_MEMORY_STEPS
    trainer = _trainer(plan, job.device, most, [_TwoApplied(plan)], limit_val_batches=0)
    batches = _loader(train_windows(corpus.train, job.shape, most, job.seed), job.shape.batch)
    trainer.fit(GPT2(job.shape, most, job.seed), batches, _loader(val_windows(corpus.val, job.shape), job.shape.batch))


def _fit(job: Job, corpus: Corpus, report: Callable[[Reading], None], peak: int) -> Result:
    shape = job.shape
    train, val = train_windows(corpus.train, shape, job.steps, job.seed), val_windows(corpus.val, shape)
    module = GPT2(shape, job.steps, job.seed)
    init_crc = _crc(module)
    plan = MODES[job.mode].plan()
    recorder, witness = Recorder(plan, job, peak, report), Witness()
    trainer = _trainer(plan, job.device, job.steps, [recorder, witness, PrecisionAudit(run_dir=job.folder)])
    trainer.fit(module, _loader(train, shape.batch), _loader(val, shape.batch))
    median = statistics.median(recorder.seconds[min(WARM_UP_STEPS, job.steps // 2) :])
    return Result(
        mode=job.mode,
        compute_dtype=witness.dtype,
        step_ms=1000 * median,
        tokens_per_s=shape.tokens_per_step / median,
        peak_mib=peak / 2**20,
        val_loss=recorder.val_loss,
        skipped=int(plan.skipped_steps),
        final_scale=None if plan.scaler is None else float(plan.scaler.get_scale()),
        data_crc=zlib.crc32(train.numpy().tobytes()),
        init_crc=init_crc,
    )


def _crc(module: nn.Module) -> int:
    value = 0
    for parameter in module.parameters():
        value = zlib.crc32(parameter.detach().numpy().tobytes(), value)
    return value


def _loader(rows: Tensor, batch: int) -> DataLoader[Tensor]:
    return DataLoader(rows, batch_size=batch)  # pyright: ignore[reportArgumentType]  it has what a dataset needs


def _trainer(plan: Any, device: str, steps: int, callbacks: list[Callback], **options: Any) -> Trainer:
    return Trainer(
        accelerator="cuda" if device == "cuda" else "cpu",
        devices=1,
        # The environment is named, so that a demo inside a cluster job does not take itself for a rank of that job.
        plugins=[plan, LightningEnvironment()],
        max_steps=steps,
        max_epochs=1,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
