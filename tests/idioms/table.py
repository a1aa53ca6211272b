"""The table: what an idiom is, and how a theme's file adds one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule

from idioms.host import Host

MODES = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")
#: one device, and the strategies that run in two processes
STRATEGIES = ("single", "ddp", "fsdp2", "zero2")


@dataclass(frozen=True)
class Idiom:
    """One way to write a run, and what each cell of it ends in."""

    name: str
    #: the file of the table that has it
    theme: str
    #: the projects and files that write so
    source: str
    #: trains under the host; the host keeps what is compared
    run: Callable[[Host], None]
    #: cell → words of the refusal; a cell is a strategy, a mode, or both as "strategy mode"
    refused: Mapping[str, str] = field(default_factory=dict)
    #: cell → why it is not run: what the mode or the strategy cannot have, with stock Lightning either
    left_out: Mapping[str, str] = field(default_factory=dict)
    #: cell → why a number there is rounded otherwise than by stock, which the tolerance of the format then covers
    rounded: Mapping[str, str] = field(default_factory=dict)
    #: cell → why it rightly ends otherwise than under stock DDP
    differs: Mapping[str, str] = field(default_factory=dict)
    #: cell → what is wrong there and not mended yet; a cell that is mended fails the test until its entry is gone
    findings: Mapping[str, str] = field(default_factory=dict)

    def of(self, entries: Mapping[str, str], strategy: str, mode: str) -> str | None:
        """Return the entry of this cell, or None; the most exact name wins."""
        for cell in (f"{strategy} {mode}", strategy, mode, "all"):
            if cell in entries:
                return entries[cell]
        return None


IDIOMS: dict[str, Idiom] = {}


def idiom(
    source: str,
    *,
    refused: Mapping[str, str] | None = None,
    left_out: Mapping[str, str] | None = None,
    rounded: Mapping[str, str] | None = None,
    differs: Mapping[str, str] | None = None,
    findings: Mapping[str, str] | None = None,
    **options: Any,
) -> Callable[[Any], Any]:
    """Return a decorator that adds an idiom: a LightningModule's class, or a function of the host.

    A class is trained once. ``options`` are those of :meth:`Host.fit` for it.
    """

    def add(what: Any) -> Any:
        name = what.__name__
        assert name not in IDIOMS, f"two idioms are called {name}"
        run = what
        if isinstance(what, type) and issubclass(what, LightningModule):

            def run(host: Host) -> None:
                host.fit(what(), **options)

        else:
            assert not options, "a function calls host.fit with its options"
        theme = what.__module__.rpartition(".")[2]
        cells = (refused or {}, left_out or {}, rounded or {}, differs or {}, findings or {})
        IDIOMS[name] = Idiom(name, theme, source, run, *cells)
        return what

    return add
