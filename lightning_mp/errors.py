"""What the package raises, and how its messages read: what was given, what is allowed, and last what to do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self, TypeIs

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with what the user wrote: "Got {problem}. Allowed: {allowed}. {Fix}.".

    Where there is nothing to choose from, ``allowed`` is empty and ``problem`` says what happened.
    """

    problem: str
    _: KW_ONLY
    fix: str
    allowed: str = ""

    def __str__(self) -> str:
        given = f"Got {self.problem}" if self.allowed else self.problem
        parts = [given, *([f"Allowed: {self.allowed}"] if self.allowed else []), self.fix]
        return " ".join(_ended(_capitalised(part)) for part in parts)


def _ended(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _capitalised(text: str) -> str:
    """A word begins with a capital letter; code stays as it is."""
    word = text.split(maxsplit=1)[0] if text else ""
    return text[0].upper() + text[1:] if word.rstrip(",:;").isalpha() else text


class PlanError(ValueError):
    """A plan that cannot run as written; it carries every fault found, not only the first."""

    def __init__(self, faults: Sequence[Fault], subject: str = "MixedPrecisionPlan") -> None:
        self.faults, self.subject = tuple(faults), subject
        lines = [f"  {number}. {fault}" for number, fault in enumerate(self.faults, start=1)]
        super().__init__("\n".join([f"{subject}: {counted(len(lines), 'error')}.", *lines]))

    @classmethod
    def of(cls, problem: str, fix: str, subject: str = "MixedPrecisionPlan") -> Self:
        """That of one thing that happened, and what to do."""
        return cls([Fault(problem, fix=fix)], subject)

    def listed(self) -> str:
        """The faults as a command prints them: one alone in its line, or their count and one a line."""
        faults = [str(fault) for fault in self.faults]
        return "\n  ".join([f"{len(faults)} errors", *faults] if len(faults) > 1 else faults)

    def __reduce__(self) -> tuple[type[PlanError], tuple[tuple[Fault, ...], str]]:
        # Worker processes send their exception to the launcher; the default would rebuild it from the text.
        return type(self), (self.faults, self.subject)


class NonFiniteError(RuntimeError):
    """More non-finite values in a row than the plan allows; the fields say where from, as far as it is known."""

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
        self.rank, self.step, self.module, self.parameter = rank, step, module, parameter


class LossScaleError(NonFiniteError):
    """The loss scale overflowed at its floor under ``at_min="raise"``."""


class MissingExtraError(ImportError):
    """An optional dependency is needed here and is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{_capitalised(purpose)} needs {package}. Install it: {install_line(package, extra)}", name=package
        )
        self._given = package, extra, purpose

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str, str]]:
        return type(self), self._given


def install_line(package: str, extra: str) -> str:
    """The command that installs the packages of ``extra``, by name: the package itself is on no index."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        requirements = requires("lightning-mp") or []
    except PackageNotFoundError:  # a checkout that is on the path and was never installed
        requirements = [f'{package}; extra == "{extra}"']
    named = [line.partition(";")[0].strip() for line in requirements if f'extra == "{extra}"' in line]
    isolation = "--no-build-isolation " if extra == "deepspeed" else ""  # its build needs the torch that is here
    return f"pip install {isolation}{' '.join(map(repr, named))}"


class Faults:
    """Collects faults, so that one error can report all of them; as a context manager it raises at its end."""

    def __init__(self, subject: str = "MixedPrecisionPlan") -> None:
        self._subject, self.found = subject, list[Fault]()

    def add(self, problem: str, *, fix: str, allowed: str = "") -> None:
        """Note a :class:`Fault`."""
        self.found.append(Fault(problem, fix=fix, allowed=allowed))

    def unknown(self, what: str, word: object, known: Iterable[str], otherwise: str = "remove it") -> None:
        """Note a name that is none of ``known``; the fix names the nearest, or is ``otherwise`` where none is near."""
        names = list(dict.fromkeys(known))
        self.add(f"unknown {what} {word!r}", allowed=", ".join(names), fix=did_you_mean(str(word), names, otherwise))

    def whole(self, name: str, value: object, least: int, fix: str) -> None:
        """Note ``value`` unless it is a whole number of at least ``least``."""
        if not is_whole(value) or value < least:
            self.add(f"{name}={value!r}", allowed=f"a whole number >= {least}", fix=fix)

    def one_of(self, name: str, value: object, allowed: Sequence[object], fix: str) -> None:
        """Note ``value`` unless it is one of ``allowed``, which are of one type; 1 is not True."""
        if not isinstance(value, type(allowed[0])) or value not in allowed:
            self.add(f"{name}={value!r}", allowed=", ".join(map(repr, allowed)), fix=fix)

    def extend(self, faults: Iterable[Fault]) -> None:
        """Note faults found elsewhere."""
        self.found.extend(faults)

    def raise_if_any(self) -> None:
        """Raise :class:`PlanError` with everything noted so far."""
        if self.found:
            raise PlanError(self.found, self._subject)

    def unwrap(self, value: T | None) -> T:
        """``value``, where nothing was noted; else raise as ``raise_if_any`` does."""
        self.raise_if_any()
        assert value is not None, "else there was a fault"
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.raise_if_any()


def nearest(word: str, known: Iterable[str], count: int = 3) -> str:
    """The ``count`` names most like ``word`` in any case, quoted, or an empty string when none is."""
    by_lower = {name.lower(): repr(name) for name in known}
    return ", ".join(by_lower[low] for low in difflib.get_close_matches(word.lower(), by_lower, n=count, cutoff=0.4))


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "write one of these", count: int = 3) -> str:
    """The fix for a name that is not known: the ``count`` nearest ones, or ``otherwise`` where none is near."""
    near = nearest(word, known, count)
    return f"did you mean {near}?" if near else otherwise


def near_keywords(init: Callable[P, None]) -> Callable[P, None]:
    """An ``__init__`` that refuses an unknown keyword with the nearest one."""

    @wraps(init)
    def checked(*args: P.args, **keywords: P.kwargs) -> None:
        known = list(signature(init).parameters)[1:]
        with Faults() as faults:
            for name in keywords.keys() - set(known):
                faults.unknown("argument", name, known)
        init(*args, **keywords)

    return checked


def is_number(value: Any) -> TypeIs[int | float]:
    """Whether ``value`` is a finite int or float; True and False are neither."""
    # math.isfinite raises for an integer beyond the range of a float.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


def is_whole(value: Any) -> TypeIs[int]:
    """Whether ``value`` is an int; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def counted(count: int, noun: str) -> str:
    """``1 step``, ``1,000 steps``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def number(value: float) -> str:
    """Four significant digits, whole numbers with separators, powers of ten only where they are shorter."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def in_short(count: float) -> str:
    """``98.7M``, ``7.24B``, ``135B``."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= unit:
            return f"{count / unit:.3g}{letter}"
    return f"{count:,.0f}"


def in_bytes(size: float) -> str:
    """Bytes in the unit that fits: ``12 bytes``, ``1.5 KiB``, ``49.4 GiB``."""
    if abs(size) < 1024:
        return counted(round(size), "byte")
    power = int(min(math.log(abs(size), 1024), 3))  # the largest unit for an infinite size too
    return f"{size / 1024**power:,.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def one_line(error: BaseException) -> str:
    """An exception's text without its line breaks."""
    return " ".join(str(error).split())


def pinning(patterns: Iterable[str], *, under_plan: bool, dtype: str = "fp32") -> str:
    """How modules are stored and run in ``dtype``: as a plan's field, or as a callback beside Lightning's plugins."""
    pins = "{" + ", ".join(f"{pattern!r}: {dtype!r}" for pattern in patterns) + "}"
    return f"pins={pins}, before any other pin" if under_plan else f"DtypePinning({pins})"
