"""What TrainingHealth measures, under every plugin of one device: against a plain loop over the same batches."""

import csv
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_mp.callbacks import LossScaleMonitor, NonFiniteGuard, TrainingHealth
from lightning_mp.health import loss_scale_monitor, measurement
from lightning_mp.health.throughput import default_tokens, samples_in
from lightning_mp.record import metric_names, run_log
from support import health
from support.language import LENGTH, Language, gpt2, tokens
from support.manual import Pair, in_turn
from support.models import Regression, batches
from support.oracles import MODES, plan_for, stock_for
from support.running import fit, trainer

#: how near half precision comes to fp32
NEAR = {"32-true": 1e-4, "bf16-mixed": 5e-2, "16-mixed": 1e-2, "bf16-true": 0.2, "16-true": 5e-2}
PLAIN = partial(torch.optim.AdamW, lr=health.LR, eps=1e-4)
FUSED = partial(torch.optim.AdamW, lr=health.LR, eps=1e-4, fused=True)
hosts = pytest.mark.parametrize("host", ["stock", "plan"])


def host_of(host: str, mode: str) -> dict[str, Any]:
    return stock_for(mode) if host == "stock" else {"plugins": [plan_for(mode)]}


def watched(tmp_path: Path, module: Any = None, *, monitor: dict[str, Any] | None = None, **options: Any) -> Any:
    mine = TrainingHealth(tmp_path / "run", report=False, **(monitor or {}))
    fit(module or Regression(PLAIN), callbacks=[mine, *options.pop("callbacks", [])], **options)
    return mine


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("optimizer", ["plain", "fused"])
@pytest.mark.parametrize("mode", MODES)
@hosts
def test_the_numbers_are_those_of_a_plain_loop(host: str, mode: str, optimizer: str, tmp_path: Path) -> None:
    """Unscaled gradients before clipping, whoever divides by the scale, and when."""
    clip = {"gradient_clip_val": 1e-3} if optimizer == "plain" else {}  # stock Lightning clips no fused one
    module = Regression(PLAIN if optimizer == "plain" else FUSED)
    rows = watched(tmp_path, module, max_steps=1, **clip, **host_of(host, mode)).rows
    (expected,) = health.oracle(world=1)[:1]
    ratio = expected.pop(metric_names.UPDATE_RATIO)
    assert {name: rows[0][name] for name in expected} == pytest.approx(expected, rel=NEAR[mode])
    if not clip:
        assert rows[0][metric_names.UPDATE_RATIO] == pytest.approx(ratio, rel=max(NEAR[mode], 5e-2))


def test_a_window_that_an_epoch_left_out_is_no_part_of_the_next_step(tmp_path: Path) -> None:

    class LeftOut(Regression):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if (self.current_epoch, batch_idx) == (0, 3) else None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            return loss * math.nan if (self.current_epoch, batch_idx) == (0, 2) else loss

    mine, guard = TrainingHealth(tmp_path, report=False), NonFiniteGuard(run_dir=tmp_path)
    fit(LeftOut(PLAIN), callbacks=[mine, guard], accumulate_grad_batches=2, max_epochs=2)
    assert [row[metric_names.STEP] for row in mine.rows] == list(range(5))
    assert all(math.isfinite(row[metric_names.LOSS]) for row in mine.rows)
    assert (guard.applied_steps, guard.skipped_steps) == (5, 0)


@hosts
def test_with_accumulation_a_step_is_its_whole_window(host: str, tmp_path: Path) -> None:
    rows = watched(tmp_path, accumulate_grad_batches=2, **host_of(host, "32-true")).rows
    for row, expected in zip(rows, health.oracle(world=1, accumulate=2), strict=True):
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def by_hand(module: Any, batch: Any, batch_idx: int) -> None:
    in_turn(module, batch, batch_idx)
    module.look()


@pytest.mark.parametrize("optimizer", ["plain", "fused"])
@pytest.mark.parametrize("mode", ["32-true", "16-mixed"])
@hosts
def test_by_hand_with_several_optimizers(host: str, mode: str, optimizer: str, tmp_path: Path) -> None:
    module = Pair(by_hand, optimizer=PLAIN if optimizer == "plain" else FUSED)
    rows = watched(tmp_path, module, **host_of(host, mode)).rows
    assert [row[metric_names.STEP] for row in rows] == list(range(0, 16, 2))
    for row, gradients in zip(rows, module.true, strict=True):
        assert row[metric_names.GRAD_NORM] == pytest.approx(health.norm(gradients.values()), rel=1e-3)
        assert row[metric_names.LR] == health.LR
        assert row[metric_names.UPDATE_RATIO] > 0


def test_tokens_samples_and_flops_over_the_same_time(tmp_path: Path) -> None:
    mine = TrainingHealth(tmp_path / "run", peak_flops=1e9, report=False)
    fit(Language(gpt2()), data=tokens(), callbacks=[mine])
    flops = 4_055_040 / (2 * LENGTH)  # a token
    for row in mine.rows:
        assert row[metric_names.TOKENS_PER_S] == pytest.approx(LENGTH * row[metric_names.SAMPLES_PER_S])
        assert row[metric_names.MFU] == pytest.approx(flops * row[metric_names.TOKENS_PER_S] / 1e9)
        assert row[metric_names.MEMORY_PEAK] > 0


IDS, CODES = torch.full((2, 5), 7), torch.zeros(2, dtype=torch.long)


class Graph:
    x, edge_index = torch.zeros(5, 2), torch.zeros(2, 9, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "tokens", "samples"),
    {
        "ids": (IDS, 10, 2),
        "ids in a tuple": ((IDS.int(), torch.zeros(2, 5)), 10, 2),
        "ids and labels": ([IDS, IDS], 10, 2),
        "a mapping": ({"pixels": torch.zeros(2, 9), "input_ids": IDS}, 10, 2),
        "a mapping and labels": (({"input_ids": IDS}, CODES), 10, 2),
        "a table of categories": ((IDS, torch.zeros(2, 1)), None, 2),
        "bytes of pixels": ((IDS.byte(), IDS.byte()), None, 2),
        "ids and captions": ((IDS, ["a", "b"]), None, 2),
        "floats": ((torch.zeros(2, 5), torch.zeros(2, 1)), None, 2),
        "classes": ((torch.zeros(2, 5), CODES), None, 2),
        "several classes of a sample": ((torch.zeros(2, 5), IDS), None, 2),
        "a mask": ((torch.zeros(2, 5, dtype=torch.bool),), None, 2),
        "several inputs": (([torch.zeros(2, 5), torch.zeros(2, 3)], CODES), None, 2),
        "a graph": (Graph(), None, None),
        "time first": ((torch.zeros(7, 2, 5), CODES), None, None),
    }.values(),
)
def test_what_a_batch_holds_is_known_or_none(batch: Any, tokens: int | None, samples: int | None) -> None:
    assert (default_tokens(batch), samples_in(batch)) == (tokens, samples)


def test_memory_holds_the_last_readings_and_the_files_hold_all(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(run_log, "IN_MEMORY", 3)
    monkeypatch.setattr(loss_scale_monitor, "IN_MEMORY", 3)
    scale = LossScaleMonitor()
    mine = watched(tmp_path, Regression(PLAIN, overflow_at=range(5)), callbacks=[scale], plugins=[plan_for("16-mixed")])
    rows, events = (lines(tmp_path / "run" / name) for name in ("metrics.jsonl", "events.jsonl"))
    assert (len(rows), len(events)) == (8, 5)
    assert (mine.rows, [event.to_dict() for event in mine.events]) == (rows[-3:], events[-3:])
    assert [row["step"] for row in scale.rows] == [5, 6, 7]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"
    assert not list((tmp_path / "run").glob(".*.lock"))


@pytest.mark.parametrize("beside", [(), (LossScaleMonitor,)])
def test_every_logger_gets_every_reading_once(beside: Any, tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, name=name) for name in ("one", "two")]
    extra = [callback() for callback in beside]
    mine = watched(tmp_path, logger=loggers, callbacks=extra, plugins=[plan_for("16-mixed")])
    for logger in loggers:
        with (Path(logger.log_dir) / "metrics.csv").open() as file:
            written = list(csv.DictReader(file))
        for name in (metric_names.LOSS, metric_names.GRAD_NORM, metric_names.LOSS_SCALE, metric_names.LR):
            points = [(int(row["step"]), float(row[name])) for row in written if row[name]]
            assert points == [(row[metric_names.STEP], pytest.approx(row[name])) for row in mine.rows]


@pytest.mark.parametrize("ranks", [1, 2])
def test_numbers_that_arrive_late_say_the_same(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that is behind: the same rows, events and logged steps, in files and loggers."""

    class Event:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            pass

    def run(name: str) -> Any:
        folder = tmp_path / name
        module = Regression(PLAIN, overflow_at=(3, 7))
        logger, scale = CSVLogger(folder), LossScaleMonitor()
        options = host_of("plan", "16-mixed") | {"logger": logger, "log_every_n_steps": 1}
        mine = watched(folder, module, callbacks=[scale], **options)
        with (Path(logger.log_dir) / "metrics.csv").open() as file:
            written = [(int(row["step"]), row[metric_names.GRAD_NORM]) for row in csv.DictReader(file)]
        rows = [{key: value for key, value in row.items() if "_per_s" not in key} for row in mine.rows]
        for row in rows:
            row.pop(metric_names.MEMORY_ALLOCATED), row.pop(metric_names.MEMORY_PEAK)
        events = lines(folder / "run" / "events.jsonl")
        assert [event["step"] for event in events] == [3, 7]
        return repr((rows, events, scale.rows, sorted(row for row in written if row[1])))

    at_once = run("at once")
    start = measurement.ToHost._start

    def late(self: Any, *args: Any) -> Any:
        sent = start(self, *args)
        sent.event, self._ranks = Event(), ranks
        return sent

    monkeypatch.setattr(measurement.ToHost, "_start", late)
    assert run("late") == at_once


@pytest.mark.parametrize("name", ["val/loss", "val_loss"])
def test_what_validation_logged_is_a_row_of_its_own(name: str, tmp_path: Path) -> None:
    class Validated(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log(name, self.loss(batch).detach() * 0 + 2.5)

    mine = TrainingHealth(tmp_path, report=False)
    runner = trainer(callbacks=[mine], val_check_interval=4, num_sanity_val_steps=1)
    runner.fit(Validated(PLAIN), batches(), batches())
    assert [row for row in lines(tmp_path / "metrics.jsonl") if metric_names.VAL_LOSS in row] == [
        {"step": 4, metric_names.VAL_LOSS: 2.5},
        {"step": 8, metric_names.VAL_LOSS: 2.5},
    ]
