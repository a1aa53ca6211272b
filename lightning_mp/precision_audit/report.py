"""The report of an audit: declared and observed dtypes of each module, as text, markdown and plain values."""

import io
import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_mp.errors import Faults, counted
from lightning_mp.precision_audit.judge import Declaration, Difference, computed, differences, joined
from lightning_mp.precision_audit.observer import Observed

_COLUMNS = ("declared", "param", "input", "output", "compute", "grad", "reduce", "optimizer_state")
_HEADS = ("module", *_COLUMNS[:-1], "state")
#: characters of a line that has room for every column
_WIDE = 100
_STAR = (
    "* not a difference: norms, look-ups and elementwise work may run in fp32 (torch's autocast lists, or the module's "
    "own code), and fp32 products in TF32 where torch's switches allow it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """One module. Dtypes are short names (``"fp32"``), joined if there are several (``"bf16, fp32"``).

    ``None`` means not observed; in ``declared`` it means not declared. ``compute`` has the dtypes of its products,
    norms and look-ups. ``differences`` has an entry for each dtype that is not as declared.
    """

    module: str
    declared: str | None
    param: str | None
    input: str | None
    output: str | None
    compute: str | None
    grad: str | None
    reduce: str | None
    optimizer_state: str | None
    ok: bool
    differences: tuple[Difference, ...] = ()
    #: the ranks on which it differs; empty if it differs on all of them, or on none
    ranks: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return every field as plain values."""
        values = asdict(self)
        return {**values, "differences": list(values["differences"]), "ranks": list(self.ranks)}

    @property
    def starred(self) -> bool:
        """True if it computes in another dtype than declared, and may do so."""
        return self.ok and self.declared is not None and self.compute not in (self.declared, None)

    def cells(self) -> list[str]:
        """Return the cells of the table after the module's name."""
        # The declared half precision leaves operators to torch's lists, which run them in fp32.
        by_lists = " (autocast)" if self.starred and self.compute == "fp32" == self.param else ""
        notes = {"declared": by_lists, "compute": "*" if self.starred else ""}
        return [(getattr(self, column) or "-") + notes.get(column, "") for column in _COLUMNS]


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Declared against observed dtypes, a row for every module with parameters of its own.

    A module without parameters has a row only if it multiplies in another dtype than declared. ``declared_by`` names
    the plan or the plugin, ``where`` the step and the device. ``notes`` name parts that could not be observed, and
    settings that the device ignores.
    """

    rows: tuple[AuditRow, ...]
    declared_by: str
    where: str = ""
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if every module is as declared."""
        return all(row.ok for row in self.rows)

    @property
    def summary(self) -> str:
        """Return one line: the number of modules as declared, the plan or plugin, and the step."""
        wrong = sum(not row.ok for row in self.rows)
        count = counted(len(self.rows), "module")
        verdict = f"{count}, all as declared" if not wrong else f"{wrong} of {count} not as declared"
        return f"{verdict} by {self.declared_by}" + (f" ({self.where})" if self.where else "")

    def to_text(self, width: int = 110) -> str:
        """Return the table for a terminal of ``width`` characters. Layers with equal cells share a line."""
        rows = [[f"{' ' if row.ok else '!'} {name}", *row.cells()] for name, row in self._lines()]
        columns = {head: [row[place] for row in rows] for place, head in enumerate(_HEADS)}
        narrow = width < _WIDE and len(rows) > 1  # no room for columns that are equal in every row
        alike = [f"{head} {cells[0]}" for head, cells in columns.items() if narrow and len(set(cells)) == 1]
        columns = {head: cells for head, cells in columns.items() if not (narrow and len(set(cells)) == 1)}
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("  module", overflow="fold")
        for head in list(columns)[1:]:
            table.add_column(head, no_wrap=True)
        for row in zip(*columns.values(), strict=True):
            table.add_row(*row)
        head = [self.summary] + ([f"  every module: {', '.join(alike)}"] if alike else [])
        text = io.StringIO()
        console = Console(file=text, width=width, color_system=None, highlight=False, markup=False, emoji=False)
        console.print(*head, table, *self._below(), sep="\n")
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def to_markdown(self) -> str:
        """Return the report as a markdown table, with the differences and the notes below it."""
        heads = [*_HEADS, "ok"]
        rows = [[f"`{name}`", *row.cells(), "yes" if row.ok else "**no**"] for name, row in self._lines()]
        table = [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]
        parts = [[f"{self.summary}."], table, [f"- {fault}" for fault in self._faults().found]]
        parts.append([f"> {note}".replace("> * ", "> \\* ") for note in self._below()])
        return "\n\n".join("\n".join(part) for part in parts if part) + "\n"

    def _lines(self) -> Iterator[tuple[str, AuditRow]]:
        rows = {row.module: row for row in self.rows}
        for label, first in grouped({name: (row.ok, *row.cells()) for name, row in rows.items()}):
            yield label, rows[first]

    def _below(self) -> list[str]:
        return [*([_STAR] if any(row.starred for row in self.rows) else []), *self.notes]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, as in ``audit.json``."""
        about = {"declared_by": self.declared_by, "where": self.where, "notes": list(self.notes)}
        return {"ok": self.ok, "summary": self.summary, **about, "rows": [row.to_dict() for row in self.rows]}

    def raise_if_different(self) -> None:
        """Raise if any module differs.

        Raises:
            PlanError: one fault for each difference: declared dtype, observed dtype, likely cause and fix.
        """
        self._faults().raise_if_any()

    def explanation(self) -> str:
        """Return one numbered line for each difference, with its likely cause and fix; empty without any."""
        return "\n".join(f"  {number}. {fault}" for number, fault in enumerate(self._faults().found, start=1))

    def _faults(self) -> Faults:
        """Return one fault for each difference. Modules with equal differences share one."""
        faults, groups = Faults("PrecisionAudit"), defaultdict[Any, list[str]](list)
        for row in self.rows:
            groups[row.differences, row.ranks].append(_shown(row.module))
        for (differences_, ranks), modules in groups.items():
            names = modules if len(modules) <= _NAMES else [label for label, _ in grouped(dict.fromkeys(modules))]
            more = [f"{len(names) - _NAMES} more"] if len(names) > _NAMES else []
            named = ", ".join(names[:_NAMES] + more) + (f" ({len(modules)} modules)" if len(names) > 1 else "")
            where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
            for difference in differences_:
                faults.add(
                    f"{named} {_WITH[difference.what]} {difference.found}{where}",
                    allowed=f"{difference.declared}, as {self.declared_by} declares. Likely cause: {difference.reason}",
                    fix=difference.fix,
                )
        return faults

    def __str__(self) -> str:
        return self.to_text()


_WITH = {
    "param": "with parameters stored in",
    "compute": "computed in",
    "reduce": "with gradients summed across ranks in",
    "optimizer_state": "with optimizer state in",
}
#: names that are written out
_NAMES = 12
#: the number of a layer within a name, not at its end: the children of a ``Sequential`` may be of several classes
_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


def _shown(module: str) -> str:
    return module or "(the root module)"


def grouped(keys: Mapping[str, Hashable]) -> list[tuple[str, str]]:
    """Group names that have equal keys and differ in the numbers of layers alone.

    Return, for each group, the text to show (``"layers.*.norm (2)"``) and the first name.
    """
    groups = defaultdict[Any, list[str]](list)
    for name, key in keys.items():
        groups[_INDEX.sub("*", name), key].append(name)
    return [
        (f"{form} ({len(names)})" if len(names) > 1 else _shown(names[0]), names[0])
        for (form, _), names in groups.items()
    ]


def build(
    declaration: Declaration, ranks: Sequence[Mapping[str, Observed]], *, where: str = "", notes: Sequence[str] = ()
) -> AuditReport:
    """Judge the observations of each rank. The row of a module joins the observations of all ranks."""
    rows: list[AuditRow] = []
    for name, first in ranks[0].items():
        seen = [rank[name] for rank in ranks if name in rank]
        by_rank = [tuple(differences(name, observed, declaration)) for observed in seen]
        wrong = tuple(rank for rank, different in enumerate(by_rank) if different)
        if not first.param and not wrong:
            continue
        every = Observed(first.class_name)
        for observed in seen:
            every.add(observed)
        row = AuditRow(
            module=name,
            declared=declaration.declared(name),
            **{column: joined(getattr(every, column)) for column in ("param", "input", "output", "grad", "reduce")},
            compute=joined(computed(every)),
            optimizer_state=joined(every.state),
            ok=not wrong,
            differences=tuple(dict.fromkeys(chain(*by_rank))),
            ranks=wrong if len(wrong) < len(ranks) else (),
        )
        rows.append(row)
    hidden = sum(observed.hidden and bool(observed.param) for observed in ranks[0].values())
    where_hidden = "of compiled or scripted regions: what runs there, or is multiplied outside of modules, is not seen"
    said = (*declaration.notes, *notes, *([f"{counted(hidden, 'module')} {where_hidden}"] if hidden else []))
    return AuditReport(tuple(rows), declaration.by, where, said)
