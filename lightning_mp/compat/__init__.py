"""What this package uses of torch, Lightning and DeepSpeed beyond their public names, each once, and why."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(owner: Any, **values: Any) -> Generator[None, None, None]:
    """Within, attributes of ``owner`` have other values; those before come back, also after a failure."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
