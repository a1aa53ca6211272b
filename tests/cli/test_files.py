"""``lightning-mp init`` and ``consolidate``: configs of the package to edit, and weights of a run's checkpoint."""

from fractions import Fraction
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from lightning_mp import MixedPrecisionPlan
from lightning_mp.cli import app
from lightning_mp.cli.files import shipped
from support.models import Regression
from support.running import fit
from support.saving import SaveAt

pytestmark = pytest.mark.usefixtures("own_folder")


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def _shown(*arguments: str) -> object:
    result = _run("train", *arguments, "run_dir=x", "--show")
    assert result.exit_code == 0, result.stderr
    assert not Path("x").exists()
    return yaml.safe_load(result.stdout)


def test_init_alone_lists_every_config_with_what_it_is() -> None:
    lines = _run("init").output.splitlines()
    for group, options in shipped().items():
        assert f"{group}:" in lines
        for option in options:
            line = next(line for line in lines[lines.index(f"{group}:") :] if line.split()[:1] == [option])
            assert len(line.split()) > 2, line


@pytest.mark.parametrize("name", sorted(shipped()["experiment"]))
def test_a_copied_experiment_is_the_experiment(name: str) -> None:
    _run("init", name)
    assert _shown(f"{name}.yaml") == _shown(f"experiment={name}")


def test_a_copied_file_of_a_group_is_chosen_before_the_packages() -> None:
    _run("init", "plan/fp16")
    copied = Path("configs/plan/fp16.yaml")
    (modeline, *rest), own = copied.read_text().splitlines(), shipped()["plan"]["fp16"]
    assert rest == own.read_text().splitlines()[1:]
    assert modeline.endswith(f"$schema={own.parents[1].as_uri()}/schema/plan.json")
    copied.write_text(copied.read_text() + "reduce_dtype: bf16\n")
    result = _run("train", "--config-dir", "configs", "plan=fp16", "--show")
    assert yaml.safe_load(result.stdout)["plan"]["reduce_dtype"] == "bf16"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("llamatny", "'llamatny' is no config of the package. Did you mean 'llama_tiny'"),
        ("llama_tiny", "llama_tiny.yaml exists"),
    ],
)
def test_an_unknown_name_and_a_file_that_is_there_are_refused(name: str, says: str) -> None:
    Path("llama_tiny.yaml").write_text("mine")
    refused = _run("init", name)
    assert refused.exit_code == 2
    assert says in refused.stderr
    assert Path("llama_tiny.yaml").read_text() == "mine"


class WithExtraState(Regression):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    plan = MixedPrecisionPlan("bf16-mixed", pins={"norms": "fp32"})
    fit(WithExtraState(), callbacks=[SaveAt(folder, 8)], plugins=[plan])
    return str(folder / "8.ckpt")


@pytest.mark.parametrize(("options", "dtypes"), [((), "bf16, fp32"), (("--all",), "bf16")])
def test_consolidate_casts_what_was_pinned_only_where_all_is_asked_for(
    options: tuple[str, ...], dtypes: str, checkpoint: str, tmp_path: Path
) -> None:
    out = tmp_path / "net.safetensors"
    result = _run("consolidate", checkpoint, str(out), "--dtype", "bfloat16", "--prefix", "net.", *options)
    assert result.exit_code == 0
    size = sum(tensor.nbytes for tensor in load_file(out).values())
    assert result.output == f"{out}: 6 tensors, {size / 1024:.1f} KiB, {dtypes}\n"
    assert sorted(load_file(out)) == ["0.bias", "0.weight", "1.bias", "1.weight", "3.bias", "3.weight"]


def test_consolidate_reads_objects_only_with_trust() -> None:
    torch.save({"state_dict": {"a": torch.zeros(2)}, "hyper_parameters": Fraction(1, 2)}, "x.ckpt")
    refused = _run("consolidate", "x.ckpt", "w.pt")
    assert refused.exit_code == 2
    assert "--trust" in refused.stderr
    assert _run("consolidate", "x.ckpt", "w.pt", "--trust").exit_code == 0
