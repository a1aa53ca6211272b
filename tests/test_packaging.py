"""The package as it is installed: what an import costs, what the extras hold, and that the pins cover them."""

import ast
import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import metadata, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lightning_mp
from lightning_mp.errors import install_line

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lightning-mp"
HEAVY = ("torch", "lightning", "pytorch_lightning", "transformers", "deepspeed", "omegaconf", "hydra")
#: floor 0, which import-linter holds to be pure data
FLOOR_0 = ("deepspeed.merge", "errors", "planner", "policy.load", "record.events", "record.report")


def heavy_modules_after(statement: str) -> list[str]:
    code = f"{statement}\nimport json, sys\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def required_by(extra: str) -> set[str]:
    found: set[str] = set()
    for requirement in map(Requirement, requires(PACKAGE) or []):
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        if canonicalize_name(requirement.name) == PACKAGE:
            found |= set().union(*map(required_by, requirement.extras))
        elif not requirement.marker.evaluate({"extra": ""}):
            found.add(canonicalize_name(requirement.name))
    return found


def pinned() -> dict[str, list[Requirement]]:
    pins: dict[str, list[Requirement]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate():
                pins.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return pins


@pytest.mark.parametrize("name", ["callbacks", "numerics", "planner"])
def test_a_public_package_is_there_without_an_import_of_its_own(name: str) -> None:
    assert lightning_mp.__getattr__(name).__name__ == f"lightning_mp.{name}"


def test_importing_the_package_and_its_pure_data_loads_neither_torch_nor_lightning() -> None:
    assert heavy_modules_after("import lightning_mp") == []
    assert heavy_modules_after("; ".join(f"import lightning_mp.{module}" for module in FLOOR_0)) == []


def imported() -> set[str]:
    """The top-level packages that the package's modules import, by a statement or by ``import_module("...")``."""
    names: set[str] = set()
    for path in (ROOT / "lightning_mp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "import_module":
                names |= {part.value for part in node.args if isinstance(part, ast.Constant)}
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"lightning_mp"}


def test_every_package_that_is_imported_is_declared() -> None:
    distributions = {"hydra": "hydra-core", "lightning_utilities": "lightning-utilities", "yaml": "pyyaml"}
    type_checkers_alone = {"typing_extensions"}
    declared = {canonicalize_name(Requirement(line).name) for line in requires(PACKAGE) or []}
    missing = {distributions.get(name, name) for name in imported() - type_checkers_alone} - declared
    assert missing == set()
    assert "torch" in imported(), "the search reads the package"


def test_the_version_is_written_in_one_place() -> None:
    assert version(PACKAGE) == lightning_mp.__version__
    assert lightning_mp.__version__ not in (ROOT / "pyproject.toml").read_text().partition("dependencies")[0]


def test_all_is_every_extra_that_a_user_may_want_at_run_time() -> None:
    at_run_time = ("hf", "deepspeed", "hydra", "fp8", "cli")
    assert required_by("all") == set().union(*map(required_by, at_run_time))


def test_every_dependency_is_pinned_once_in_a_version_that_is_allowed() -> None:
    pins = pinned()
    assert [name for name, lines in pins.items() if len(lines) > 1] == []
    wrong = []
    for requirement in map(Requirement, requires(PACKAGE) or []):
        name = canonicalize_name(requirement.name)
        if name == PACKAGE:
            continue
        exact = [spec.version for pin in pins.get(name, []) for spec in pin.specifier if spec.operator == "=="]
        if len(exact) != 1 or not requirement.specifier.contains(exact[0], prereleases=True):
            wrong.append((str(requirement), exact))
    assert wrong == []


WRITTEN = [
    *ROOT.glob("*.md"),
    *(path for folder in ("docs", "examples", "lightning_mp") for path in (ROOT / folder).rglob("*")),
]
RAISED = {
    found
    for path in WRITTEN
    if path.suffix == ".py"
    for found in re.findall(
        r'(?:MissingExtraError|install_line)\(["\'](\S+)["\'], ["\'](\S+?)["\']', path.read_text(encoding="utf-8")
    )
}


def test_an_install_line_in_a_text_names_the_checkout_and_extras_that_it_has() -> None:
    extras, lines = set(metadata(PACKAGE).get_all("Provides-Extra") or []), 0
    for path in (path for path in WRITTEN if path.suffix in (".py", ".md", ".ipynb", ".yaml", ".j2")):
        for line in re.findall(r"pip install ('[^'{]+'|[^\s`'{]\S*)", path.read_text(encoding="utf-8")):
            (what,) = shlex.split(line)
            assert what.startswith("."), f"{path}: {line}, which is on no index"
            assert Requirement(re.sub(r"^\.", PACKAGE, what)).extras <= extras, f"{path}: {line}"
            lines += 1
    assert lines > 5


def test_the_line_for_a_missing_extra_installs_its_package_from_an_index() -> None:
    words: list[str] = []
    for package, extra in sorted(RAISED):
        pip, install, *rest = shlex.split(install_line(package, extra))
        names = {Requirement(word).name for word in rest if not word.startswith("-")}
        assert (pip, install) == ("pip", "install")
        assert PACKAGE not in names
        assert package in names | {"safetensors"}  # which comes with transformers
        words += rest
    done = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--quiet", *words]
    subprocess.run(done, check=True, capture_output=True, timeout=60)
