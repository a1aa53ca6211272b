"""Fixtures of every test."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from support.ranks import Ranks, in_a_fork

if "OMP_NUM_THREADS" not in os.environ:  # as under `make test`: two threads add up in another order than one
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

with suppress(ImportError):  # the oldest environment has none
    from hypothesis import HealthCheck, settings

    # Whether a test passes does not depend on how fast the machine is, or how busy.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two processes that run the cases of a test module; they start with its first case."""
    with Ranks() as started:
        yield started


@pytest.fixture(scope="module")
def pristine() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process that has set nothing and run nothing: a fork of one that imports it."""
    with Ranks(1) as started:
        yield lambda function, *arguments: started.call(in_a_fork, function, *arguments)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a module's runs write that several of its tests look at."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The present folder is the test's own: what a run writes where nothing says where to."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """What a test draws does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No plan, and no environment or group of a distributed strategy, which runs in ``in_a_process`` therefore."""
    yield
    assert os.environ.pop("RANK", None) is None
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.fixture(autouse=True)
def _what_is_logged() -> Iterator[None]:
    """Lightning's loggers say after each test what they said before: a program that a test runs here may quiet them."""
    loggers = [
        logging.getLogger(name)
        for name in list(logging.root.manager.loggerDict)
        if name.startswith(("lightning", "pytorch_lightning"))
    ]
    before = [(logger, logger.level, logger.disabled) for logger in loggers]
    disabled = logging.root.manager.disable
    yield
    logging.disable(disabled)
    for logger, level, off in before:
        logger.setLevel(level)
        logger.disabled = off
