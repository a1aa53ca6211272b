"""The names under which a run's readings are logged and written down, the same in every logger, file and report."""

from __future__ import annotations

STEP = "step"
LOSS = "train/loss"
VAL_LOSS = "val/loss"
GRAD_NORM = "health/grad_norm"
PARAM_NORM = "health/param_norm"
UPDATE_RATIO = "health/update_ratio"
LOSS_SCALE = "health/loss_scale"
SKIPPED_STEPS = "health/skipped_steps"
SKIPPED_IN_A_ROW = "health/skipped_in_a_row"
LR = "health/lr"
TOKENS_PER_S = "health/tokens_per_s"
SAMPLES_PER_S = "health/samples_per_s"
MFU = "health/mfu"
MEMORY_ALLOCATED = "health/memory_allocated_gib"
MEMORY_PEAK = "health/memory_peak_gib"
