"""The schema that editors read is that of the dataclasses, takes the shipped files, which name it, and marks typos."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from benchmarks.schema import FOLDER, MODELINE, train_schema, write
from lightning_mp.cli.files import shipped
from support.docs import ROOT, blocks

NAMING = [FOLDER.parent / "lightning_mp.yaml", *shipped()["experiment"].values(), *shipped()["plan"].values()]


def faults(schema: Any, values: Any) -> list[str]:
    return [error.json_path for error in Draft7Validator(schema).iter_errors(values)]


def test_the_files_are_what_the_dataclasses_say(tmp_path: Path) -> None:
    write(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_text() == (FOLDER / path.name).read_text(), "run python -m benchmarks.schema"
        Draft7Validator.check_schema(json.loads(path.read_text()))


@pytest.mark.parametrize("path", NAMING, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_shipped_file_names_its_schema_and_is_valid(path: Path) -> None:
    (line,) = [line for line in path.read_text().splitlines()[:2] if line.startswith(MODELINE)]
    schema = path.parent / line.removeprefix(MODELINE)
    assert faults(json.loads(schema.read_text()), yaml.safe_load(path.read_text())) == []


def test_the_training_files_of_the_documentation_are_valid() -> None:
    written = [block for block in blocks("docs/how-to/hydra.md") if block.language == "yaml"]
    written += [block for block in blocks("docs/how-to/cluster.md") if block.language == "yaml"]
    assert written
    assert [faults(train_schema(), yaml.safe_load(block.code)) for block in written] == [[]] * len(written)
    assert (ROOT / "pyproject.toml").read_text().count("configs/schema/*.json") == 1


#: what is written, and where an editor marks it; None where it is right
WRITTEN: dict[str, tuple[str, str | None]] = {
    "a word": ("plan: bf16", None),
    "pins": ("plan: {pins: {norms: fp32, lm_head: {dtype: bf16, output: input}}}", None),
    "a constructor": ("plan: {loss_scaling: {_target_: lightning_mp.LossScaling.static, scale: 8}}", None),
    "an interpolation": ("plan: {precision: '${mode}'}\nmode: auto", None),
    "no such mode": ("plan: {precision: 16-mixd}", "$.plan"),
    "no such field": ("plan: {pin: {norms: fp32}}", "$.plan"),
    "no such field of a piece": ("plan: {nonfinite: {acton: skip}}", "$.plan"),
    "no such dtype": ("plan: {pins: {norms: fp31}}", "$.plan"),
    "no such strategy": ("strategy: {name: fsdp3}", "$.strategy"),
    "no such argument": ("trainer: {max_step: 3}", "$.trainer"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_typo_is_marked(name: str) -> None:
    text, path = WRITTEN[name]
    assert faults(train_schema(), yaml.safe_load(text)) == ([] if path is None else [path])
