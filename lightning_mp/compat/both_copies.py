"""A program that imports both of Lightning's copies: one is used, and the Trainer of the other is refused in words."""

from __future__ import annotations

from functools import partial
from typing import NoReturn

from lightning_mp.compat.host import host, imported, other
from lightning_mp.compat.lightning import of_copy
from lightning_mp.errors import Fault, PlanError


def meet_other_copy(cls: type, base: str) -> None:
    """Give ``cls`` the class ``base`` of the other copy too, and that copy the ``mp_*`` names, where it is imported.

    Of what is not its own, a Trainer says no more than "invalid type". It takes this, and what to write is said by
    :func:`check_copy` when a run begins, or by the name.
    """
    if other() not in imported():
        return
    theirs, registry = of_copy(other(), base), of_copy(other(), "StrategyRegistry")
    if theirs not in cls.__mro__:
        cls.__bases__ = (*cls.__bases__, theirs)
    for name in [known for known in of_copy(host(), "StrategyRegistry") if known.startswith("mp_")]:
        registry.register(name, partial(_refuse, f"a Trainer with strategy={name!r}", "Trainer"), override=True)


def check_copy(thing: object, subject: str) -> None:
    """Refuse a Trainer or a LightningModule of the other copy.

    Raises:
        PlanError: ``thing`` is made of the copy of Lightning that this process does not use.
    """
    if any(cls.__module__.startswith(f"{other()}.") for cls in type(thing).__mro__):
        _refuse(f"a {type(thing).__name__}", subject)


def _refuse(what: str, subject: str) -> NoReturn:
    fault = Fault(
        f"{what} of {other()} where lightning_mp uses {host()}",
        "one of the two in a process, the one imported first: neither takes what is made of the other",
        f"write 'import {host()} as pl' throughout, or 'import {other()}' before every other import",
    )
    raise PlanError([fault], subject)
