"""CUDA tests: kernels, clocks and real copies; what the host asks of a device is tested without one, in cuda_path."""

import warnings

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _sync_debug_has_warned() -> None:
    """The first use of torch's sync debug mode warns that it is a prototype; a warning would fail that test."""
    if torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("warn")
            torch.cuda.set_sync_debug_mode("default")
