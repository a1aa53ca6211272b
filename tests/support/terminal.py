"""A terminal of so many columns in place of the standard streams."""

from __future__ import annotations

import io
import os
import re
import sys
from types import TracebackType
from typing import Any


class _Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


class Terminal:
    """Within, stdout and stderr are a terminal; ``text`` is what was printed, without colours."""

    def __init__(self, columns: int) -> None:
        self._columns, self._screen = columns, _Tty()

    def __enter__(self) -> Terminal:
        self._before: tuple[Any, ...] = sys.stdout, sys.stderr, dict(os.environ)
        sys.stdout = sys.stderr = self._screen
        os.environ.update(COLUMNS=str(self._columns), TERM="xterm")
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        sys.stdout, sys.stderr, environment = self._before
        os.environ.clear()
        os.environ.update(environment)

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self._screen.getvalue())
