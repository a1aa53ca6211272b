"""Writes the pictures of the report that the README shows: ``PYTHONPATH=.:tests python -m report.pictures``.

What they show is a real run: a small GPT-2 in fp16, its scale set too high at first and one of its batches a bad one.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything
from torch import Tensor

from lightning_mp import LossScaling, MixedPrecisionPlan
from lightning_mp.callbacks.loss_scale_monitor import LossScaleMonitor
from lightning_mp.callbacks.precision_audit import PrecisionAudit
from lightning_mp.callbacks.training_health import TrainingHealth
from lightning_mp.demo.language_model import CausalLM
from lightning_mp.demo.text_windows import TextWindows
from lightning_mp.monitor.report import write_report
from monitor.report.browser import DESKTOP, PHONE, Shown, chromium
from support.running import trainer

IMAGES = Path(__file__).parents[3] / "docs" / "images"
STEPS, BAD = 400, 230


class OneBadBatch(CausalLM):
    """GPT-2, and one batch whose loss is weighed as nobody would want it to be."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 50 if batch_idx == BAD else loss


def train(folder: Path) -> None:
    """Train with every monitor on, and leave their files in ``folder``."""
    seed_everything(1, verbose=False)
    config = {"vocab_size": 300, "n_positions": 16, "n_layer": 2, "n_embd": 64, "n_head": 2}
    plan = MixedPrecisionPlan(
        "16-mixed",
        pins={"*ln_*": "fp32"},
        loss_scaling=LossScaling(init_scale=2.0**22, backoff_factor=2.0**-10, growth_interval=120),
    )
    monitors = [
        TrainingHealth(folder, groups={"embeddings": "wte", "blocks": "h"}, report=False),
        LossScaleMonitor(),
        PrecisionAudit(run_dir=folder),
    ]
    runner = trainer(plugins=[plan], max_steps=STEPS, gradient_clip_val=1.0, callbacks=monitors)
    runner.fit(OneBadBatch("gpt2", config, lr=3e-3), TextWindows(vocab=300, context=16))


def main() -> None:
    """Train, report, and take the pictures."""
    with tempfile.TemporaryDirectory() as root, chromium() as browser:
        folder = Path(root) / "gpt2-16-mixed"
        train(folder)
        address = write_report(folder).as_uri()
        _take(Shown(browser, address, **DESKTOP), "report.png", 1760)
        _take(Shown(browser, address, dark=True, **PHONE), "report-dark-phone.png", 1900)


def _take(shown: Shown, name: str, height: int) -> None:
    width = shown.page.evaluate("document.documentElement.clientWidth")
    area: Any = {"x": 0, "y": 0, "width": width, "height": height}
    shown.page.screenshot(path=IMAGES / name, full_page=True, clip=area)
    shown.close()


if __name__ == "__main__":
    main()
