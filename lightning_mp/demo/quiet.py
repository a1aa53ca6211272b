"""Keep other libraries' notices, right but not about the demo, away from a newcomer's screen."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from itertools import chain

from lightning_mp.compat.lightning import COPIES

# Tips, "GPU available: False", "max_steps reached" and the like come as INFO, and a model built from a config makes
# transformers warn of ids that this tokenizer does not have; matplotlib tells that it looks for fonts the first time.
# Errors still come through.
_LOGGERS = ("lightning", *chain.from_iterable(COPIES.items()), "transformers", "matplotlib")
# The data lives in memory: worker processes would only slow it down.
_WARNINGS = (
    ".*does not have many workers.*",
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    ".*GPU available but not used.*",
    # a rung may be a step long, on which fp16 looks for its scale; the table has the count of skips
    "The run applied 0 of its .*",
)


@contextmanager
def quiet() -> Generator[None]:
    """Hide known notices while in the context; loggers and warning filters are back afterwards, errors or not."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(max(logger.level, logging.ERROR))
        with warnings.catch_warnings():
            for message in _WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
