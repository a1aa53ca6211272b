"""``lightning-mp init``: what comes with the package, listed, and copied to be edited."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from lightning_mp.cli import app
from lightning_mp.cli.files import shipped

EXPERIMENTS = sorted(shipped()["experiment"])


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


pytestmark = pytest.mark.usefixtures("own_folder")


def test_alone_it_lists_every_config_with_what_it_is() -> None:
    lines = _run("init").output.splitlines()
    for group, options in shipped().items():
        assert f"{group}:" in lines
        for option in options:
            (line,) = [line for line in lines[lines.index(f"{group}:") :] if line.split()[:1] == [option]][:1]
            assert len(line.split()) > 2, line


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_copied_experiment_is_the_experiment(name: str) -> None:
    def shown(*arguments: str) -> object:
        result = _run("train", *arguments, "run_dir=x", "--show")
        assert result.exit_code == 0, result.stderr
        return yaml.safe_load(result.stdout)

    _run("init", name)
    assert shown(f"{name}.yaml") == shown(f"experiment={name}")


def test_a_copied_file_of_a_group_is_chosen_before_the_packages() -> None:
    _run("init", "plan/fp16")
    copied = Path("configs/plan/fp16.yaml")
    (modeline, *rest), own = copied.read_text().splitlines(), shipped()["plan"]["fp16"]
    assert rest == own.read_text().splitlines()[1:]
    assert modeline.endswith(f"$schema={own.parents[1].as_uri()}/schema/plan.json")
    copied.write_text(copied.read_text() + "reduce_dtype: bf16\n")
    result = _run("train", "--config-dir", "configs", "plan=fp16", "--show")
    assert yaml.safe_load(result.stdout)["plan"]["reduce_dtype"] == "bf16"


def test_an_unknown_name_and_a_file_that_is_there_are_refused() -> None:
    near = _run("init", "llamatny")
    assert near.exit_code == 2
    assert "'llamatny' is no config of the package. Did you mean 'llama_tiny'" in near.stderr
    Path("llama_tiny.yaml").write_text("mine")
    taken = _run("init", "llama_tiny")
    assert taken.exit_code == 2
    assert "llama_tiny.yaml exists" in taken.stderr
    assert Path("llama_tiny.yaml").read_text() == "mine"
