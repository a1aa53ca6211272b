"""The doctor's findings for a terminal or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_mp.monitor.findings import Finding

if TYPE_CHECKING:
    from rich.console import Console

_EXIT = {"info": 0, "warning": 1, "error": 2}
_COLOURS = {"info": "cyan", "warning": "yellow", "error": "bold red"}


def exit_status(findings: Sequence[Finding]) -> int:
    """0 where nothing or ``info`` was found, 1 with warnings, 2 with errors."""
    return max((_EXIT[finding.severity] for finding in findings), default=0)


def as_json(findings: Sequence[Finding]) -> str:
    """The findings as a JSON array, an object each."""
    return json.dumps([finding.to_dict() for finding in findings], indent=2, ensure_ascii=False)


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings, most severe first."""
    from rich.padding import Padding
    from rich.text import Text

    for finding in findings:
        where = f"  {finding.where}" if finding.where else ""
        head = Text.assemble(
            (f"{finding.code} {finding.severity}", _COLOURS[finding.severity]), f" {finding.name}{where}"
        )
        console.print(head)
        for label, text in (("what", finding.what), ("why", finding.why), ("fix", finding.fix)):
            console.print(Padding(Text.assemble((f"{label}: ", "dim"), text), (0, 0, 0, 2)))
    counts = [f"{sum(f.severity == severity for f in findings)} {severity}" for severity in reversed(_EXIT)]
    console.print(f"{len(findings)} found: {', '.join(counts)}" if findings else "nothing found")
