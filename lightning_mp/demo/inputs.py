"""What the demo refuses, and the checks that need nothing but the standard library."""

from __future__ import annotations

from importlib.util import find_spec

from lightning_mp.errors import Fault, MissingExtraError

# package, extra that installs it, what the demo wants it for
_NEEDED = (
    ("transformers", "hf", "the demo's GPT-2 model"),
    ("tokenizers", "hf", "the demo's byte-pair encoding"),
    ("matplotlib", "report", "the demo's picture"),
    ("plotly", "report", "the demo's report"),
)


class InputError(ValueError):
    """Something the user gave that the demo cannot use, as one line: given, allowed, what to do."""

    def __init__(self, given: str, allowed: str, fix: str) -> None:
        super().__init__(str(Fault(given, allowed, fix)))


def check_extras() -> None:
    """Refuse to start where an optional package of the demo is missing, before anything is trained.

    Raises:
        MissingExtraError: names the first missing package and the extra that installs it.
    """
    for package, extra, purpose in _NEEDED:
        if find_spec(package) is None:
            raise MissingExtraError(package, extra, purpose)
