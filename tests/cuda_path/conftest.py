"""The processes that a session's cases run in."""

from collections.abc import Iterator

import pytest

from cuda_path.machine import CannotBuildError, Processes, library


@pytest.fixture(scope="session")
def cuda() -> Iterator[Processes]:
    """A CUDA machine without a GPU: it needs a C++ compiler, once."""
    try:
        library()
    except CannotBuildError as error:
        pytest.skip(f"the CUDA device of nothing cannot be built: {error}")
    processes = Processes()
    yield processes
    processes.stop()
