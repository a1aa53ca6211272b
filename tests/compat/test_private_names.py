"""Private names of the hosts stand in ``compat/`` alone, are there, and are missed in a readable way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import requires, version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from torch import nn

import lightning_mp
from lightning_mp import MixedPrecisionPlan, PlanError, make_strategy
from lightning_mp.callbacks import LossScaleMonitor
from lightning_mp.compat import deepspeed, lightning, transformers
from lightning_mp.compat import torch as compat
from lightning_mp.compat.checks import VERSIONS, PrivateNames
from support.models import Regression

ROOT = Path(lightning_mp.__file__).parent
TABLES = {
    f"{module.__name__.rpartition('.')[2]}.{name}": table
    for module in (compat, lightning, deepspeed)
    for name, table in vars(module).items()
    if isinstance(table, PrivateNames)
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_name_is_in_what_is_installed(table: PrivateNames) -> None:
    assert table.missing() == []


@pytest.mark.parametrize("host", VERSIONS)
def test_the_versions_that_a_refusal_names_are_the_bounds_of_the_package(host: str) -> None:
    bounds = [Requirement(line) for line in requires("lightning-mp") or ()]
    assert {bound.specifier for bound in bounds if bound.name == host} == {SpecifierSet(VERSIONS[host])}
    if host == "torchao" and find_spec(host) is None:
        pytest.skip("the oldest releases are installed without it")
    assert version(host) in SpecifierSet(VERSIONS[host])


def test_every_host_has_an_upper_bound() -> None:
    bounds = [Requirement(line) for line in requires("lightning-mp") or ()]
    hosts = [bound for bound in bounds if not _only_for_development(bound) and bound.name != "lightning-mp"]
    assert {bound.name for bound in hosts} > {*VERSIONS, "peft", "omegaconf", "hydra-core", "jsonargparse"}
    assert [bound.name for bound in hosts if not any(part.operator == "<" for part in bound.specifier)] == []


def _only_for_development(bound: Requirement) -> bool:
    return any(f'"{extra}"' in str(bound.marker) for extra in ("test", "dev", "docs"))


# ------------------------------------------------------------------ a release that lacks one


def test_a_plan_that_is_attached_names_what_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_amp_update_scale_")
    monkeypatch.delattr(nn.Module, "_load_from_state_dict")
    with pytest.raises(PlanError) as caught:
        MixedPrecisionPlan("16-mixed").convert_module(Regression())
    (fault,) = caught.value.faults
    assert str(fault) == (
        f"Got torch {version('torch')}, which has no torch._amp_update_scale_, torch.nn.Module._load_from_state_dict. "
        f"Allowed: torch {VERSIONS['torch']}. Run pip install 'torch{VERSIONS['torch']}'."
    )


@pytest.mark.parametrize(
    ("strategy", "host", "place", "name"),
    [
        ("ddp", "lightning", "lightning.pytorch.strategies:DDPStrategy", "_setup_model"),
        ("fsdp2", "lightning", "lightning.pytorch.strategies:ModelParallelStrategy", "_setup_distributed"),
        ("fsdp2", "torch", "torch.distributed.fsdp:FSDPModule", "_get_fsdp_state"),
        ("hsdp", "torch", "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState", "_pre_backward"),
        ("fsdp1", "torch", "torch.distributed.fsdp:FullyShardedDataParallel", "_flat_param"),
        ("deepspeed_zero2", "lightning", "lightning.pytorch.strategies:DeepSpeedStrategy", "_load_config"),
        ("deepspeed_zero2", "deepspeed", "deepspeed.runtime.engine:DeepSpeedEngine", "_cast_module_mixed_precision"),
    ],
)
def test_a_strategy_that_is_built_names_what_its_host_lacks(
    strategy: str, host: str, place: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, owner = place.partition(":")
    for base in getattr(import_module(module), owner).__mro__:
        if name in vars(base):
            monkeypatch.delattr(base, name)
    with pytest.raises(PlanError) as caught:
        make_strategy(strategy, MixedPrecisionPlan("bf16-mixed"))
    (fault,) = caught.value.faults
    assert fault.given == f"{host} {version(host)}, which has no {owner}.{name}".replace(
        f"no {owner}", f"no {owner if host == 'lightning' else place.replace(':', '.')}"
    )
    assert fault.allowed == f"{host} {VERSIONS[host]}"


def test_callbacks_name_what_lightning_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(import_module("lightning.pytorch.loops").__dict__["_FitLoop"], "_should_accumulate")
    with pytest.raises(PlanError, match=r"(?s)callbacks: 1 fault.*has no FitLoop\._should_accumulate"):
        LossScaleMonitor()


def test_what_only_instances_have_is_found_in_the_code_that_assigns_it() -> None:
    class Given:
        declared: int

        def __init__(self) -> None:
            self._assigned = 1

        def read(self) -> int:
            return self._read

        @property
        def other(self) -> int:
            self._in_property = 1
            return 1

    import_module(__name__).Given = Given
    table = PrivateNames("torch", {f"{__name__}:Given()": ("declared", "_assigned", "_read", "_in_property")})
    assert table.missing() == [f"{__name__}.Given._read"]


def test_a_module_or_class_that_is_gone_lacks_all_its_names() -> None:
    table = PrivateNames(
        "torch", {"torch.nowhere": ("_a",), "torch.nn:Nothing": ("_b",), "torch.nn:Nothing()": ("_c",)}
    )
    assert table.missing() == ["torch.nowhere._a", "torch.nn.Nothing._b", "torch.nn.Nothing._c"]


# ------------------------------------------------------------------ nowhere else

#: names in the tables: a class of this package may override them, or use what it inherits
_INHERITED = frozenset(
    name for table in TABLES.values() for names in table.names.values() for name in names if name.startswith("_")
)
_FOREIGN = (
    _INHERITED
    | set(compat.WRAPPERS)
    | {compat.GROWTH_TRACKER, compat.INNER_SCHEDULERS, transformers.IS_INITIALIZED}
    | {"_fsdp_param_groups", "_gradient_checkpointing_func", "_init_weights", "_no_split_modules"}
    | {"ds_id", "ds_numel", "ds_process_group", "ds_tensor"}
)
#: a documented function of the interpreter, and Hydra's keywords
_ALLOWED = {"_getframe", "_convert_"}


def _private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def _own_names(trees: list[ast.Module]) -> set[str]:
    """What classes and functions of this package define under a private name."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found - _FOREIGN


def _is_self(node: ast.expr) -> bool:
    """``self``, ``cls`` or ``super()``, in a cast or not."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "cast":
        return _is_self(node.args[1])
    return ast.unparse(node) in ("self", "cls", "super()")


def _uses(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    stores = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    slots = {node.attr for node in stores if ast.unparse(node.value) == "self"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (_private(node.attr) or node.attr in _FOREIGN):
            inherited = _is_self(node.value) and node.attr in _INHERITED
            if node.attr not in own and not inherited:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call):
            reads = ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr")
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)] if reads else []
            keywords = [keyword.arg for keyword in node.keywords]
            found = [name for name in (*texts, *keywords) if _private(name) or name in _FOREIGN]
            yield from ((node.lineno, str(name)) for name in found if name not in own)
        elif isinstance(node, ast.Constant) and node.value in _FOREIGN - slots:
            yield node.lineno, repr(node.value)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            paths = [f"{module}.{alias.name}" for alias in node.names]
            foreign = [path for path in paths if not path.startswith(("lightning_mp", "__future__"))]
            yield from ((node.lineno, path) for path in foreign if any(map(_private, path.split("."))))


def test_no_private_name_of_a_host_is_used_outside_of_compat() -> None:
    files = [path for path in ROOT.rglob("*.py") if path.parent.name != "compat"]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    own = _own_names(trees) | _ALLOWED
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, tree in zip(files, trees, strict=True)
        for line, name in _uses(tree, own)
    ]
    assert found == [], "\n".join(found)
