"""What the documentation's tables say is so: migrations, modes, the summary of conformance, errors."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_mp import MixedPrecisionPlan
from lightning_mp.policy import PRECISIONS, PrecisionPolicy
from support import docs_setup
from support.docs import ROOT, tables, text

PROJECT = Path(docs_setup.__file__).parent / "docs_project"
CODE = re.compile(r"^`([^`]+)`$")


# ---------------------------------------------------------------------- migrating


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the migration pages, in a folder of their own."""
    from contextlib import nullcontext

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(PROJECT))
    known = docs_setup.accelerate_loop()
    loss = docs_setup.loss_of(known["model"], next(iter(known["loader"])))
    loss.backward()
    known["trainer"] = _Attached()
    return {**known, "loss": loss, "self": _Logs(), "nullcontext": nullcontext}


class _Logs:
    """What ``self.log`` is to a line of a ``training_step``: it takes what LightningModule's takes."""

    def log(self, *arguments: Any, **keywords: Any) -> None:
        import inspect

        from lightning.pytorch import LightningModule

        inspect.signature(LightningModule.log).bind(self, *arguments, **keywords)


class _Attached:
    """A Trainer's methods as lines of a script: each takes what the Trainer's does."""

    def __getattr__(self, name: str) -> Any:
        import inspect

        from lightning.pytorch import Trainer

        signature = inspect.signature(getattr(Trainer, name))
        return lambda *arguments, **keywords: signature.bind(self, *arguments, **keywords)


def _rows(page: str) -> Iterator[tuple[str, str]]:
    """The rows of the page's migration tables whose first two cells are code."""
    for table in (table for table in tables(page) if table[0][0] != "key"):
        for row in table[1:]:
            found = [CODE.match(cell) for cell in row[:2]]
            if len(found) == 2 and found[0] and found[1]:
                yield found[0][1], found[1][1]


def _is_expression(code: str) -> bool:
    try:
        return isinstance(ast.parse(code, mode="eval").body, ast.Call | ast.Attribute)
    except SyntaxError:
        return False


@pytest.mark.filterwarnings("ignore")  # what stock hosts say of a CPU
@pytest.mark.parametrize("page", ["lightning", "accelerate", "deepspeed"])
def test_both_sides_of_a_row_are_what_their_hosts_take(page: str, project: dict[str, Any]) -> None:
    rows = [(old, new) for old, new in _rows(f"docs/migrating/{page}.md") if _is_expression(new)]
    assert len(rows) > 12
    for old, new in rows:
        if page == "deepspeed":
            assert MixedPrecisionPlan.from_deepspeed(json.loads(f"{{{old}}}")).deepspeed_notes, old
        elif not _needs_cuda(old):
            _evaluated(old, project)
        _evaluated(new, project)


def _needs_cuda(code: str) -> bool:
    return 'accelerator="cuda"' in code


def _evaluated(code: str, names: dict[str, Any]) -> Any:
    if "ccelerator" in code:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    if code.startswith("accelerator."):
        names = {**names, "accelerator": names["Accelerator"](cpu=True)}
        names["accelerator"].prepare(names["optimizer"])
        if "load_state" in code:
            names["accelerator"].save_state("folder")
    try:
        return eval(code, dict(names))
    except Exception as error:
        raise AssertionError(f"{code}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize(("old", "new"), list(_rows("docs/migrating/deepspeed.md")))
def test_a_json_that_says_formats_gives_the_plan_of_the_other_column(
    old: str, new: str, project: dict[str, Any]
) -> None:
    if not new.startswith(("MixedPrecisionPlan(", "LossScaling.")) or "checkpointing" in new:
        return
    entries = json.loads(f"{{{old}}}")
    if "fp16" in entries:
        entries["fp16"].setdefault("enabled", True)
    if list(entries) == ["communication_data_type"]:
        entries["bf16"] = {"enabled": True}
    read, wanted = MixedPrecisionPlan.from_deepspeed(entries).policy, _evaluated(new, project)
    if new.startswith("LossScaling."):
        assert read.loss_scaling == wanted
    else:
        assert read == wanted.policy


def test_the_accelerate_keys_of_the_table_are_accelerates() -> None:
    import inspect

    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    launcher = {action.dest for action in launch_command_parser()._actions}
    known = launcher | set(inspect.signature(ClusterConfig).parameters)
    keys = [
        word.partition(":")[0]
        for table in tables("docs/migrating/accelerate.md")
        if table[0][0] == "key"
        for row in table[1:]
        for word in re.findall(r"`([a-z_]+(?::[^`]*)?)`", row[0])
    ]
    assert len(keys) > 15
    assert set(keys) - known == set()


# ---------------------------------------------------------------------- modes and strategies


def test_the_table_of_modes_is_the_policys() -> None:
    (table,) = [table for table in tables("docs/modes.md") if table[0][0] == "precision"]
    rows = {row[0].strip("`"): row[1:] for row in table[1:]}
    for precision in (name for name in PRECISIONS if name != "auto"):
        policy = PrecisionPolicy(precision=precision)
        stored, computed, reduced, state, scale, *rest = rows[precision]
        assert stored == state == policy.storage_dtype
        assert computed.split()[0] == policy.compute_dtype
        assert reduced == policy.reduce_dtype
        assert (scale == "dynamic") == (policy.loss_scaling is not None)
        if rest:  # weight, gradient and Adam's two moments, all as stored
            assert int(rest[0]) == 4 * {"fp32": 4, "bf16": 2, "fp16": 2}[policy.storage_dtype]


#: the columns of the summary, and those of docs/conformance.md
GROUPS = (
    ("single", "ddp", "fsdp2", "hsdp", "fsdp2_offload", "pipeline"),
    ("deepspeed_zero1", "deepspeed_zero2"),
    ("deepspeed_zero3", "deepspeed_zero2_offload", "deepspeed_zero3_offload"),
)


@pytest.mark.parametrize("page", ["docs/strategies.md", "README.md"])
def test_the_summary_of_conformance_is_what_conformance_found(page: str) -> None:
    (summary,) = [table for table in tables(page) if "one device, DDP, FSDP2" in table[0][1]]
    head, *rows = tables("docs/conformance.md")[0]
    found = {row[0].strip("`"): dict(zip(head[1:], row[1:], strict=True)) for row in rows}
    # ``ddp@pytorch_lightning`` is ``ddp`` under Lightning's other name
    assert {name.partition("@")[0] for name in head[1:]} == {name for group in GROUPS for name in group} | {"fsdp1"}
    assert all(cells["fsdp1"].startswith("refused" if "+pins" in policy else "same") for policy, cells in found.items())
    told = 0
    for modes, *verdicts in summary[1:]:
        for mode in re.findall(r"`([^`]+)`", modes):
            for group, verdict in zip(GROUPS, verdicts, strict=True):
                for policy in (name for name in found if name.partition("+")[0] == mode):
                    told += 1
                    for strategy in (name for name in found[policy] if name.partition("@")[0] in group):
                        assert found[policy][strategy].startswith(verdict.partition(":")[0]), (policy, strategy)
    assert told == len(found) * len(GROUPS)


#: bytes a parameter on one of eight devices, as how-to/out-of-memory.md says
BYTES = {
    "fsdp2": 16 / 8, "fsdp1": 16 / 8, "deepspeed_zero3": 20 / 8,
    "deepspeed_zero1": 2 + 16 / 8, "deepspeed_zero2": 2 + 16 / 8,
}  # fmt: skip


@pytest.mark.parametrize("strategy", BYTES)
def test_the_bytes_a_device_holds_are_those_that_conformance_measured(strategy: str) -> None:
    after = text("docs/conformance.md").partition(f"### {strategy}\n")[2]
    formula = re.search(r"Bytes a rank by formula: ([^.]+)\.", after)
    assert formula
    terms = re.sub(r"(\d)([SPH])", r"\1*\2", formula[1]).split(", ")
    assert sum(eval(term, {"S": 4, "H": 2, "P": 1, "N": 8}) for term in terms) == BYTES[strategy]


# ---------------------------------------------------------------------- errors


def _literal(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def _refusals() -> Iterator[tuple[str, str]]:
    """Where something is refused, and what was given, with ``{}`` for what varies."""
    for path in sorted((ROOT / "lightning_mp").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and len(node.args) == 3:
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                given = _literal(node.args[0]) if name in ("add", "Fault") else None
                if given is not None:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", given


#: a name and a value out of its range
VALUE = re.compile(r"^(?:[\w.]|\{\})+=\{\}$")


def _given_on_the_page() -> list[str]:
    return [
        given
        for table in tables("docs/errors.md")
        if table[0][0] == "got"
        for row in table[1:]
        for given in re.findall(r"`([^`]+)`", row[0])
    ]


def _pattern(given: str) -> re.Pattern[str]:
    """``…`` is whatever varies; where hardly anything else is said it is no more than that."""
    says = len(re.findall(r"[a-z]", given)) >= 8
    return re.compile((".*" if says else r"(?:\{\})+").join(map(re.escape, given.split("…"))))


def test_every_refusal_is_on_the_page_of_errors() -> None:
    patterns = list(map(_pattern, _given_on_the_page()))
    missing = [
        f"{place}: {given}"
        for place, given in _refusals()
        if not VALUE.match(given) and not any(pattern.fullmatch(given) for pattern in patterns)
    ]
    assert missing == []


def test_what_the_page_of_errors_quotes_is_said_somewhere() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "lightning_mp").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    for given in _given_on_the_page():
        for piece in given.split("…"):
            words = piece.strip(" =.,:()'[]")
            assert words in joined, given


def test_every_exception_class_is_on_the_page_of_errors() -> None:
    page = text("docs/errors.md")
    for path in (ROOT / "lightning_mp").rglob("*.py"):
        for name in re.findall(r"^class (\w+Error)\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert f"| `{name}`" in page, f"{path}: {name}"
