"""What the package raises, and how its messages read: what was given, what is allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with what the user wrote."""

    given: str
    allowed: str
    fix: str

    def __str__(self) -> str:
        return f"given {self.given}; allowed: {self.allowed}; do: {self.fix}"


class PlanError(ValueError):
    """A plan that cannot run as written; it carries every fault found, not only the first."""

    def __init__(self, faults: Sequence[Fault], subject: str = "MixedPrecisionPlan") -> None:
        self.faults = tuple(faults)
        self.subject = subject
        count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        lines = [f"{subject}: {count}, nothing was changed."]
        lines += [f"  {number}. {fault}" for number, fault in enumerate(self.faults, start=1)]
        super().__init__("\n".join(lines))

    def listed(self) -> str:
        """The faults as a command prints them: one alone in its line, or their count and one a line."""
        faults = [str(fault) for fault in self.faults]
        return "\n  ".join([f"{len(faults)} faults", *faults] if len(faults) > 1 else faults)

    def __reduce__(self) -> tuple[type[PlanError], tuple[tuple[Fault, ...], str]]:
        # Worker processes send their exception to the launcher; the default would rebuild it from the text.
        return type(self), (self.faults, self.subject)


class NonFiniteError(RuntimeError):
    """Training met more non-finite values in a row than the plan allows.

    ``rank``, ``step``, ``module`` and ``parameter`` say where the value came from; ``None`` where it
    could not be told.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        step: int | None = None,
        module: str | None = None,
        parameter: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.module = module
        self.parameter = parameter


class LossScaleError(NonFiniteError):
    """The loss scale overflowed at its floor under ``at_min="raise"``."""


class MissingExtraError(ImportError):
    """An optional dependency is needed here and is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"given an environment without {package!r}; allowed: {purpose} needs it; "
            f"do: pip install 'lightning-mp[{extra}]'",
            name=package,
        )
        self._given = package, extra, purpose

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str, str]]:
        return type(self), self._given


class Faults:
    """Collects faults, so that one error can report all of them."""

    def __init__(self, subject: str = "MixedPrecisionPlan") -> None:
        self._subject = subject
        self._found: list[Fault] = []

    def add(self, given: str, allowed: str, fix: str) -> None:
        """Note one fault."""
        self._found.append(Fault(given, allowed, fix))

    def extend(self, faults: Iterable[Fault]) -> None:
        """Note faults found elsewhere."""
        self._found.extend(faults)

    def raise_if_any(self) -> None:
        """Raise :class:`PlanError` with everything noted so far."""
        if self._found:
            raise PlanError(self._found, self._subject)

    @property
    def found(self) -> tuple[Fault, ...]:
        """What was noted so far."""
        return tuple(self._found)


def nearest(word: str, known: Iterable[str], count: int = 3) -> str:
    """The ``count`` names most like ``word``, quoted, or an empty string when none is."""
    close = difflib.get_close_matches(word, list(dict.fromkeys(known)), n=count, cutoff=0.4)
    return ", ".join(repr(name) for name in close)


def one_line(error: BaseException) -> str:
    """An exception's text without its line breaks."""
    return " ".join(str(error).split())
