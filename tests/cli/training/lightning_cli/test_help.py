"""The help of ``lightning-mp cli`` shows every field of a plan: its type, its default and what it is."""

from __future__ import annotations

import inspect
import re
from dataclasses import Field, fields
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from typer.testing import CliRunner

from lightning_mp import MixedPrecisionPlan
from lightning_mp.cli import app
from lightning_mp.policy import Checkpointing, NonFinite, Pin, PrecisionPolicy
from lightning_mp.policy.loss_scaling import LossScaling
from lightning_mp.strategies.registry import STRATEGIES

KINDS = {
    "plan": PrecisionPolicy,
    "plan.loss_scaling": LossScaling,
    "plan.pins": Pin,
    "plan.checkpointing": Checkpointing,
    "plan.nonfinite": NonFinite,
}
#: an option, its metavar, and the form that appends to a list
OPTION = r"^--\S+ (\{[^}]*\}|[A-Z_0-9]+)(, --\S+ [A-Z_]+)? "
FIELDS = [(prefix, item) for prefix, kind in KINDS.items() for item in fields(kind)]


@pytest.fixture(scope="module")
def entries() -> dict[str, str]:
    """The options of ``fit --help`` and the text of each, without line breaks."""
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["cli", "fit", "--help"])
    assert result.exit_code == 0
    found: dict[str, str] = {}
    for block in re.split(r"\n(?=  -|\S|\n)", result.stdout.partition("options:")[2]):
        text = " ".join(block.split())
        if text.startswith("--"):
            key = text.split()[0]
            assert key not in found
            found[key] = text
    return found


@pytest.mark.parametrize(("prefix", "item"), FIELDS, ids=[f"{prefix}.{item.name}" for prefix, item in FIELDS])
def test_a_field_is_in_the_help_with_its_type_default_and_meaning(
    prefix: str, item: Field[Any], entries: dict[str, str]
) -> None:
    text = entries[f"--{prefix}.{item.name}"]
    said, _, typed = re.sub(OPTION, "", text).replace("(required, type:", "(type:").partition(" (type: ")
    assert len(said.split()) >= 3, text
    hints = get_type_hints(MixedPrecisionPlan.__init__ if prefix == "plan" else KINDS[prefix])
    shown = set(re.findall(r"\w+", typed.partition(", default:")[0]))
    assert _names(hints[item.name]) <= shown | ({"null"} if "Optional" in shown else set()), text
    parameter = inspect.signature(MixedPrecisionPlan if prefix == "plan" else KINDS[prefix]).parameters[item.name]
    if parameter.default is not inspect.Parameter.empty:
        default = "null" if parameter.default is None else parameter.default
        assert text.endswith(f"default: {default})")


def _names(hint: Any) -> set[str]:
    """The words by which the help calls a type."""
    if get_origin(hint) in (Union, UnionType):
        return {name for each in get_args(hint) for name in _names(each)}
    return {"null"} if hint is NoneType else {getattr(get_origin(hint) or hint, "__name__", "Literal")}


def test_the_plan_and_the_help_have_the_same_arguments(entries: dict[str, str]) -> None:
    shown = {key[len("--plan.") :] for key in entries if key.startswith("--plan.") and key.count(".") == 1}
    assert (
        shown
        == set(inspect.signature(MixedPrecisionPlan).parameters)
        == {item.name for item in fields(PrecisionPolicy)}
    )


def test_the_strategies_are_named_and_what_the_plan_says_is_not_the_trainers(entries: dict[str, str]) -> None:
    assert all(name in entries["--strategy"] for name in STRATEGIES)
    assert not {"--trainer.precision", "--trainer.strategy"} & set(entries)
    assert "--trainer.max_steps" in entries


def test_a_piece_has_a_help_of_its_own() -> None:
    result = CliRunner().invoke(app, ["cli", "fit", "--plan.loss_scaling.help"])
    assert result.exit_code == 0
    assert "overflows before the scale backs off" in " ".join(result.stdout.split())


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_the_commands_are_listed(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["cli", *arguments])
    assert result.exit_code == 0
    assert all(command in result.stdout for command in ("fit", "validate", "test", "predict"))


def test_the_config_is_printed_on_demand() -> None:
    options = ["--model=support.lightning_cli.Net", "--model.width=4", "--plan=longspec"]
    result = CliRunner().invoke(app, ["cli", "fit", *options, "--print_config"])
    assert result.exit_code == 0
    assert "precision: 16-mixed" in result.stdout
