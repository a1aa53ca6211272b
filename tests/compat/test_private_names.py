"""Private names of the dependencies stand in ``compat/`` alone, and are in every release that the bounds allow."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import lightning_mp
from lightning_mp.compat import torch as compat
from lightning_mp.compat import transformers
from lightning_mp.compat.private_names import PRIVATE_NAMES, missing_names

ROOT = Path(lightning_mp.__file__).parent
#: attributes without an underscore that a release may rename all the same
UNDOCUMENTED = {
    "deepspeed": "bit16_groups bit16_groups_flat cpu_offload cur_scale ds_numel ds_persist ds_process_group ds_shape "
    "ds_tensor fp16_enabled fp16_groups fp32_partitioned_groups_flat get_global_grad_norm get_lp_grad_fragment "
    "DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR get_param_comm_dtype lp_fragment_address "
    "parallel_partitioned_bit16_groups real_dp_process_group round_robin_bit16_groups round_robin_bit16_meta "
    "round_robin_bit16_offsets "
    "single_partition_of_fp32_groups was_step_applied",
    "torch": "all_gather_outputs backward_pass_autocast init_dtype_attrs init_unsharded_param "
    "param_dtype post_backward pre_forward wait_for_unshard",
    "torchao": "GemmInputRole LinearMMConfig ScaledMMConfig amax_to_scale matmul_with_hp_or_float8_args "
    "to_fp8_saturated",
}
DISTRIBUTIONS = {"deepspeed": "deepspeed", "lightning": "lightning", "torch": "torch", "torchao": "torchao"}
#: parts of torch, and transformers' models, that are large and have nothing that is used here
LEFT_OUT = ("_inductor", "testing", "include", "onnx", "_dynamo", "_refs", "sparse", "ao", "models")
#: a blank for every byte that is in no name; a regular expression would take five times as long
BETWEEN = bytes(byte if chr(byte) == "_" or (chr(byte).isalnum() and byte < 128) else 32 for byte in range(256))


@cache
def _words(package: str) -> set[str]:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return set()
    root = Path(spec.origin).parent
    files = [path for end in ("*.py", "*.pyi") for path in root.rglob(end)]
    files = [path for path in files if path.relative_to(root).parts[0] not in LEFT_OUT]
    words = set[bytes]().union(*(path.read_bytes().translate(BETWEEN).split() for path in files))
    return {word.decode(errors="ignore") for word in words}


@pytest.mark.parametrize("package", UNDOCUMENTED)
def test_attributes_that_nobody_promises_are_in_what_is_installed(package: str) -> None:
    words = _words(package)
    if not words:
        pytest.skip("the oldest releases are installed without it")
    assert set(UNDOCUMENTED[package].split()) - words == set()


def test_every_private_name_is_in_what_is_installed() -> None:
    absent = () if find_spec("torchao") else ("torchao.py",)  # the oldest releases are installed without it
    trees = [tree for path, tree in _trees().items() if path.name not in absent]
    used = {name for tree in trees for *_, name, _ in _uses(tree) if _private(name)} - _defined(trees)
    there = set[str]().union(*(_words(package) for package in DISTRIBUTIONS), _words("transformers"))
    assert used - there - _ALLOWED == set()
    assert {"_amp_update_scale_", "_should_accumulate", "_get_fsdp_state", "_cast_module_mixed_precision"} <= used


@pytest.mark.parametrize("need", PRIVATE_NAMES)
def test_no_name_of_the_table_is_missing_in_what_is_installed(need: str) -> None:
    if find_spec(need.partition(":")[0]) is None:
        pytest.skip("the oldest releases are installed without it")
    assert missing_names(need) == []


def test_the_table_has_every_private_name_that_compat_uses() -> None:
    """Else a release that lacks one would fail in the midst of a run."""
    trees = {path: tree for path, tree in _trees().items() if path.parent.name == "compat"}
    used = {name for tree in trees.values() for *_, name, of_self in _uses(tree) if _private(name) and not of_self}
    parts = [part for owners in PRIVATE_NAMES.values() for owner, names in owners.items() for part in (owner, names)]
    listed = set(re.findall(r"\w+", " ".join(parts)))
    names = {name for name in used if not name.startswith("__")}
    assert names - listed - _defined(trees.values()) - _ALLOWED - _OPTIONAL == set()
    assert "_trainer" in listed, "the search reads the table"


#: read only where they are there: marks that wrappers and transformers leave on a module
_OPTIONAL = {"_checkpoint_wrapped_module", "_forward_module", "_fsdp_wrapped_module", "_orig_mod"}
_OPTIONAL |= {"_fsdp_param_group", "_fsdp_param_groups", "_gradient_checkpointing_func", "_is_hf_initialized"}
_OPTIONAL |= {"_index_in_param_group", "_torchdynamo_orig_callable", "_z3_optimizer"}
#: documented by Python, and Hydra's keywords
_ALLOWED = {"_getframe", "_convert_", "_target_", "_args_", "_partial_", "_recursive_"}
_ALLOWED |= {"_fields", "_asdict", "_replace"}
_FOREIGN = (
    set(compat.WRAPPERS)
    | {compat.GROWTH_TRACKER, compat.INNER_SCHEDULERS, transformers.IS_INITIALIZED}
    | {"_fsdp_param_groups", "_gradient_checkpointing_func", "_init_weights", "_no_split_modules"}
    | {"_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"}
    | {"ds_id", "ds_numel", "ds_process_group", "ds_tensor"}
)


@cache
def _trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}


def _private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def _defined(trees: Iterable[ast.Module]) -> set[str]:
    """What classes and functions of this package define under a private name, and what it stores on ``self``."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update(alias.asname for alias in node.names if alias.asname)
    return found


def _is_self(node: ast.expr) -> bool:
    """``self``, ``cls`` or ``super()``, in a cast or not."""
    if isinstance(node, ast.Call):
        return _called(node) == "super" or (_called(node) == "cast" and _is_self(node.args[1]))
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _uses(tree: ast.Module) -> Iterator[tuple[int, str, str, bool]]:
    """Line, code and name of every private or foreign name, and whether it is one of ``self``, perhaps inherited."""
    stores = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    slots = {node.attr for node in stores if _is_self(node.value)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node), node.attr, _is_self(node.value) and node.attr not in _FOREIGN
        elif isinstance(node, ast.Call):
            reads = _called(node) in ("getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller")
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)] if reads else []
            parts = [part for text in texts for part in str(text).split(".")]
            names = [str(name) for name in (*parts, *(keyword.arg for keyword in node.keywords))]
            yield from ((node.lineno, name, name, False) for name in names)
        elif isinstance(node, ast.Constant) and node.value in _FOREIGN - slots:
            yield node.lineno, repr(node.value), str(node.value), False
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            paths = [f"{module}.{alias.name}" for alias in node.names]
            foreign = [path for path in paths if not path.startswith(("lightning_mp", "__future__"))]
            yield from ((node.lineno, path, part, False) for path in foreign for part in path.split("."))


def test_no_private_name_of_a_dependency_is_used_outside_of_compat() -> None:
    trees = {path: tree for path, tree in _trees().items() if path.parent.name != "compat"}
    own = (_defined(trees.values()) - _FOREIGN) | _ALLOWED
    found = [
        f"{path.relative_to(ROOT)}:{line}: {code}"
        for path, tree in trees.items()
        for line, code, name, of_self in _uses(tree)
        if (_private(name) or name in _FOREIGN) and name not in own and not of_self
    ]
    assert found == [], "\n".join(found)


#: the frozen lists of public names that load on first use, and the registry's of the strategies beside it
LAZY = {"__init__.py", "callbacks.py", "strategies/registry.py"}


def _imports_by_string(tree: ast.Module) -> bool:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    named = [call for call in calls if _called(call) in ("import_module", "__import__")]
    return any("lightning_mp" in ast.unparse(call) or "__name__" in ast.unparse(call) for call in named)


def test_no_room_is_imported_by_a_string() -> None:
    """One such import had hidden a circle of eight files."""
    found = {path.relative_to(ROOT).as_posix() for path, tree in _trees().items() if _imports_by_string(tree)}
    assert found <= LAZY
    assert "__init__.py" in found, "the search finds nothing"
