"""The errors of the package, the collection of faults, and helpers for messages.

A message names the given value first, then the allowed values, and last the fix.
"""

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
    """One mistake of the user's, as text: "Got {problem}. Allowed: {allowed}. {Fix}.".

    Without ``allowed`` the text is "{Problem}. {Fix}.", and ``problem`` says what happened.
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
    """Return ``text`` with a capital first letter. Text that begins with code stays unchanged."""
    word = text.split(maxsplit=1)[0] if text else ""
    return text[0].upper() + text[1:] if word.rstrip(",:;").isalpha() else text


class PlanError(ValueError):
    """The error for a plan, callback or command that cannot run as written.

    ``faults`` has every fault that was found, not only the first. ``subject`` names the class or
    thing with the faults, in the first line of the message.
    """

    def __init__(self, faults: Sequence[Fault], subject: str = "MixedPrecisionPlan") -> None:
        self.faults, self.subject = tuple(faults), subject
        lines = [f"  {number}. {fault}" for number, fault in enumerate(self.faults, start=1)]
        super().__init__("\n".join([f"{subject}: {counted(len(lines), 'error')}.", *lines]))

    @classmethod
    def of(cls, problem: str, fix: str, subject: str = "MixedPrecisionPlan") -> Self:
        """Return the error with one fault."""
        return cls([Fault(problem, fix=fix)], subject)

    def listed(self) -> str:
        """Return the faults as a command prints them.

        A single fault is one line. Several faults are their count and a line each.
        """
        faults = [str(fault) for fault in self.faults]
        return "\n  ".join([f"{len(faults)} errors", *faults] if len(faults) > 1 else faults)

    def __reduce__(self) -> tuple[type[PlanError], tuple[tuple[Fault, ...], str]]:
        # Worker processes send their exception to the launcher. The default pickle would rebuild it
        # from the text.
        return type(self), (self.faults, self.subject)


class NonFiniteError(RuntimeError):
    """The error that ends a run because of non-finite values.

    There were more in a row than the plan allows, or no step of the run was applied. ``rank``,
    ``step``, ``module`` and ``parameter`` say where they appeared first. Each may be ``None``.
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
        self.rank, self.step, self.module, self.parameter = rank, step, module, parameter


class LossScaleError(NonFiniteError):
    """The error for an overflow at the lowest loss scale, with ``at_min="raise"``."""


class MissingExtraError(ImportError):
    """The error for an optional dependency that is needed and not installed.

    ``purpose`` is the thing that needs ``package``, which ``extra`` installs.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{_capitalised(purpose)} needs {package}. Install it: {install_line(package, extra)}", name=package
        )
        self._given = package, extra, purpose

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str, str]]:
        return type(self), self._given


def install_line(package: str, extra: str) -> str:
    """Return the pip command that installs the packages of ``extra``.

    It names these packages, because lightning-mp itself is on no index. If lightning-mp was never
    installed, it names ``package`` only.
    """
    from importlib.metadata import PackageNotFoundError, requires

    try:
        requirements = requires("lightning-mp") or []
    except PackageNotFoundError:  # a checkout on the path that was never installed
        requirements = [f'{package}; extra == "{extra}"']
    named = [line.partition(";")[0].strip() for line in requirements if f'extra == "{extra}"' in line]
    # The build of DeepSpeed needs the installed torch.
    isolation = "--no-build-isolation " if extra == "deepspeed" else ""
    return f"pip install {isolation}{' '.join(map(repr, named))}"


class Faults:
    """A collection of faults, which one PlanError of ``subject`` reports together.

    In a ``with`` statement it raises the error at the end of the block. If the block raises, that
    exception is raised instead.
    """

    def __init__(self, subject: str = "MixedPrecisionPlan") -> None:
        self._subject, self.found = subject, list[Fault]()

    def add(self, problem: str, *, fix: str, allowed: str = "") -> None:
        """Add a :class:`Fault`."""
        self.found.append(Fault(problem, fix=fix, allowed=allowed))

    def unknown(self, what: str, word: object, known: Iterable[str], otherwise: str = "remove it") -> None:
        """Add a fault for the unknown name ``word``. ``what`` is the kind of name, for the message.

        The fix names the nearest names of ``known``, or is ``otherwise`` if none is near.
        """
        names = list(dict.fromkeys(known))
        self.add(f"unknown {what} {word!r}", allowed=", ".join(names), fix=did_you_mean(str(word), names, otherwise))

    def whole(self, name: str, value: object, least: int, fix: str) -> None:
        """Add a fault unless ``value`` is a whole number of at least ``least``."""
        if not is_whole(value) or value < least:
            self.add(f"{name}={value!r}", allowed=f"a whole number >= {least}", fix=fix)

    def one_of(self, name: str, value: object, allowed: Sequence[object], fix: str) -> None:
        """Add a fault unless ``value`` is in ``allowed`` and has the type of its first item.

        So 1 is refused if True is allowed.
        """
        if not isinstance(value, type(allowed[0])) or value not in allowed:
            self.add(f"{name}={value!r}", allowed=", ".join(map(repr, allowed)), fix=fix)

    def extend(self, faults: Iterable[Fault]) -> None:
        """Add faults that were found elsewhere."""
        self.found.extend(faults)

    def raise_if_any(self) -> None:
        """Raise :class:`PlanError` with all faults so far, if there are any."""
        if self.found:
            raise PlanError(self.found, self._subject)

    def unwrap(self, value: T | None) -> T:
        """Return ``value``, which must not be ``None``, if there is no fault.

        Raises:
            PlanError: there are faults.
        """
        self.raise_if_any()
        assert value is not None, "else there was a fault"
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.raise_if_any()


def nearest(word: str, known: Iterable[str], count: int = 3) -> str:
    """Return up to ``count`` names that resemble ``word``, quoted and joined by commas.

    Upper and lower case are equal. Without a similar name the result is an empty string.
    """
    by_lower = {name.lower(): repr(name) for name in known}
    return ", ".join(by_lower[low] for low in difflib.get_close_matches(word.lower(), by_lower, n=count, cutoff=0.4))


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "write one of these", count: int = 3) -> str:
    """Return the fix for an unknown name: a question with up to ``count`` near names.

    It is ``otherwise`` if none is near.
    """
    near = nearest(word, known, count)
    return f"did you mean {near}?" if near else otherwise


def near_keywords(init: Callable[P, None]) -> Callable[P, None]:
    """Return an ``__init__`` that raises PlanError for unknown keywords, with the nearest names."""

    @wraps(init)
    def checked(*args: P.args, **keywords: P.kwargs) -> None:
        known = list(signature(init).parameters)[1:]
        with Faults() as faults:
            for name in keywords.keys() - set(known):
                faults.unknown("argument", name, known)
        init(*args, **keywords)

    return checked


def is_number(value: Any) -> TypeIs[int | float]:
    """True if ``value`` is a finite int or float. Booleans are not."""
    # math.isfinite raises for an integer beyond the range of a float.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


def is_whole(value: Any) -> TypeIs[int]:
    """True if ``value`` is an int. Booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as ``1 step`` or ``1,000 steps``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def number(value: float) -> str:
    """Return a number as text.

    Whole numbers below 1e9 and numbers from 1,000 to 1e9 are rounded to units and have separators.
    Other numbers have four significant digits: ``0.1235``, ``1e-06``.
    """
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def in_short(count: float) -> str:
    """Return a count in millions, billions or trillions: ``98.7M``, ``7.24B``, ``1.5T``.

    A count below a million is written out: ``12,345``.
    """
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= unit:
            return f"{count / unit:.3g}{letter}"
    return f"{count:,.0f}"


def in_bytes(size: float) -> str:
    """Return a size in the unit that fits: ``12 bytes``, ``1.5 KiB``, ``49.4 GiB``."""
    if abs(size) < 1024:
        return counted(round(size), "byte")
    power = int(min(math.log(abs(size), 1024), 3))  # the largest unit for an infinite size too
    return f"{size / 1024**power:,.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def one_line(error: BaseException) -> str:
    """Return an exception's text in one line."""
    return " ".join(str(error).split())


def pinning(patterns: Iterable[str], *, under_plan: bool, dtype: str = "fp32") -> str:
    """Return code that pins the modules to ``dtype``, for a message.

    It is the field ``pins=`` if ``under_plan``, else the callback ``DtypePinning``.
    """
    pins = "{" + ", ".join(f"{pattern!r}: {dtype!r}" for pattern in patterns) + "}"
    return f"pins={pins}, before any other pin" if under_plan else f"DtypePinning({pins})"
