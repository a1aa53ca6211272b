"""One row a step in Lightning's CSV file: its logger writes a row a call, and a monitor's call is one more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from lightning_mp.compat.lightning import CSVLogger

#: how many rows wait to be written where Lightning itself logs nothing; its loggers' own number
_FLUSH = 100


def log(logger: CSVLogger, values: Mapping[str, float], step: int) -> None:
    """Log ``values`` at ``step``, in the row that others, and Lightning after them, log to at that step."""
    experiment = cast("Any", logger.experiment)
    if "log_metrics" not in vars(experiment):
        _merge_calls(experiment)
    if len(experiment.metrics) >= _FLUSH:
        logger.save()
    experiment.save = lambda: None  # Lightning saves after its own call; saved before it, the row could not be added to
    try:
        logger.log_metrics(dict(values), step=step)
    finally:
        del experiment.save


def _merge_calls(experiment: Any) -> None:
    """Have calls of one step share a row, as long as it is not written."""
    own = experiment.log_metrics

    def log_metrics(*arguments: Any, **keywords: Any) -> None:
        own(*arguments, **keywords)
        rows: list[dict[str, Any]] = experiment.metrics
        if len(rows) > 1 and rows[-1]["step"] == rows[-2]["step"]:
            last = rows.pop()
            rows[-1].update(last)

    experiment.log_metrics = log_metrics
