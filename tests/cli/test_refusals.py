"""What cannot run is refused before a model is built: a plan's faults with their places, the rest as Hydra says it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_mp.cli import app
from support.training import PLAIN, Net, refusal, write

LANGUAGE = "lightning_mp.demo.language_model.CausalLM"
CALLBACK = "callbacks: {x: %s}\nplan:"
#: what is written in place of a line of PLAIN, and the one fault: (given, do) must be found in it
BAD: dict[str, tuple[tuple[str, str], str, str]] = {
    "misspelt key of the plan": (("precision: bf", "precison: bf"), "unknown key precison (run.yaml:2)", "'precision'"),
    "misspelt argument of the model": (("width: 4", "width: 4\n  lrr: 1"), "lrr, which Net does not take", "'lr'"),
    "misspelt class": (("training.Net", "training.Nett"), "Nett names no class", "package"),
    "target that is no class": (("training.Net", "training.PLAIN"), "PLAIN names no class", "package"),
    "misspelt Trainer argument": (("max_steps", "max_step"), "trainer.max_step", "'max_steps'"),
    "precision in the Trainer": (("devices: 1", "precision: 16"), "trainer.precision", "set plan.precision instead"),
    "missing value": (("width: 4", "width: ???"), "model.width: Missing mandatory value", "model.width=..."),
    "missing argument": (("  width: 4\n", ""), "model: missing a required argument: 'width'", "Net takes width"),
    "interpolation to nowhere": (("width: 4", "width: ${data.row}"), "model.width: Interpolation key 'data.row'", ""),
    "no model": (("model:", "xyz:"), "no model", "choose one of the group"),
    "misspelt model": (("model:", "modell:"), "unknown key modell (run.yaml:3)", "'model'"),
    "misspelt plan": (("plan:", "plans:"), "unknown key plans (run.yaml:1)", "'plan'"),
    "misspelt section that is not needed": (("trainer:", "trianer:"), "unknown key trianer (run.yaml:", "'trainer'"),
    "a word for a number": (("devices: 1", "devices: 1\n  max_epochs: many"), "max_epochs='many'", "max_epochs=1"),
    "a list for a number": (("devices: 1", "devices: 1\n  num_nodes: [1]"), "trainer.num_nodes=[1]", "num_nodes=1"),
    "null for a number": (("devices: 1", "devices: 1\n  min_epochs: null\n  num_nodes: null"), "num_nodes=None", "=1"),
    "a word for a number of a callback": (
        ("plan:", "callbacks: {x: {_target_: lightning.pytorch.callbacks.ModelCheckpoint, save_top_k: all}}\nplan:"),
        "callbacks.x.save_top_k='all'",
        "save_top_k=1",
    ),
    "no plan": (("plan:", "xyz:"), "no plan", "plan=bf16"),
    "callback that is none": (
        ("plan:", CALLBACK % "{_target_: datetime.date, year: 1, month: 1, day: 1}"),
        "callbacks.x: a date, no Callback",
        "_target_",
    ),
    "checkpoint that is not there": (("plan:", "ckpt_path: gone.ckpt\nplan:"), "ckpt_path=gone.ckpt", "check the path"),
    "run_dir that does not resolve": (("plan:", "run_dir: ${nowhere}\nplan:"), "'nowhere' not found", ""),
    "a word that is no choice": (("plan:", "callbacks: healt\nplan:"), "Could not find 'callbacks/healt'", "'health'"),
    "callbacks that are a number": (("plan:", "callbacks: 3\nplan:"), "callbacks.0: 3", "_target_"),
    "a list": ((PLAIN, "- 1\n"), "run.yaml', which is no mapping", "plan:"),
    "a number": ((PLAIN, "3\n"), "does not compose: run.yaml: ", ""),
    "what is no LightningModule": (("support.training.Net\n  width: 4", "torch.nn.Flatten"), "model: a Flatten", ""),
    "data without a target": (
        ("data:\n  _target_: support.training.loader\n  rows: 12", "data: support.training.loader"),
        "Could not find 'data/support.training.loader'",
        "",
    ),
    "data of other keys": (
        ("data:\n  _target_: support.training.loader\n  rows: 12", "data: {train: 1, test: 2}"),
        "data: the keys train, test",
        "train and val",
    ),
    "an unknown architecture": (
        ("support.training.Net\n  width: 4", f"{LANGUAGE}\n  architecture: lama\n  config: {{}}"),
        "model: architecture='lama' is no model_type",
        "'llama'",
    ),
}  # fmt: skip
ARGUMENTS = {
    "plan=fp-16": ("Could not find 'plan/fp-16'", "'fp16'"),
    "plan=haff": ("Could not find 'plan/haff'", "'16-mixed'"),
    "plan=b16": ("Could not find 'plan/b16'", "'bf16'"),
    "ckpt_path=hpc": ("no hpc_ckpt_*.ckpt", "'last'"),
    "gone.yaml": ("'gone.yaml', which is no file", "check the path"),
    "plan=fp32,bf16": ("Ambiguous value for argument 'plan=fp32,bf16'", ""),
    "plan.precison=16-mixed": ("plan: unknown key precison", "'precision'"),
    "strategy=fsdp3": ("unknown strategy 'fsdp3'", "'fsdp2'"),
    "trainer=3": ("trainer=3 is no mapping", "max_steps: 100"),
    "max_steps=10": ("Could not override 'max_steps'", "+key=value"),
    "experiment=llama_tiny": ("goes into the file's own defaults list", ""),
    "data.more.rows=1": ("Could not override 'data.more.rows'", "+key=value"),
    "seed=abc": ("seed='abc'", "seed=0"),
    "seed=[1": ("the config does not compose", "quotes"),
    "trainer.max_steps=many": ("trainer.max_steps='many'", "trainer.max_steps=1"),
    "run_dir=run.yaml": ("run_dir=run.yaml: ", "choose another"),
}


@pytest.fixture(autouse=True)
def nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert {path.name for path in tmp_path.glob("runs/*/*")} <= {"config.yaml"}


@pytest.mark.parametrize("name", BAD)
def test_a_fault_is_named_with_a_way_out(name: str, tmp_path: Path) -> None:
    (old, new), given, fix = BAD[name]
    assert old in PLAIN
    built = Net.built
    (fault,) = refusal(write(tmp_path, PLAIN.replace(old, new, 1)))
    assert Net.built == built + (name == "data of other keys")
    assert given in fault.problem
    assert fix in fault.fix


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_bad_argument_is_named_with_a_way_out(argument: str, tmp_path: Path) -> None:
    given, fix = ARGUMENTS[argument]
    (fault,) = refusal(argument, write(tmp_path, PLAIN))
    assert given in fault.problem
    assert fix in fault.fix


@pytest.mark.parametrize("section", ["plan", "strategy"])
def test_a_deepspeed_json_is_read_before_a_model_is_built(section: str, tmp_path: Path) -> None:
    path = write(tmp_path, '{"fp17": {"enabled": true}}', "ds.json")
    config = PLAIN.replace("bf16-mixed", "16-mixed") + f"strategy: {{name: deepspeed_zero1, config: {path}}}\n"
    if section == "plan":
        plan = f"plan:\n  _target_: lightning_mp.MixedPrecisionPlan.from_deepspeed\n  config: {path}"
        config = PLAIN.replace("plan:\n  precision: bf16-mixed", plan)
    built = Net.built
    (fault,) = refusal(write(tmp_path, config))
    assert Net.built == built
    assert "unknown key fp17" in fault.problem


def test_a_module_of_the_users_that_does_not_import_keeps_its_own_error(tmp_path: Path) -> None:
    write(tmp_path, "import nothing_there\n", "broken_on_import.py")
    with pytest.raises(ModuleNotFoundError, match="nothing_there"):
        refusal(write(tmp_path, PLAIN.replace("support.training.Net", "broken_on_import.Net")))


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(PLAIN.replace("Net", "N\xe9t").encode("latin-1"))
    (fault,) = refusal(str(tmp_path / "run.yaml"))
    assert "run.yaml: 'utf-8' codec" in fault.problem


def test_all_faults_of_file_and_arguments_come_together(tmp_path: Path) -> None:
    text = PLAIN.replace("bf16-mixed", "bf17-mixed").replace("width", "widht").replace("max_steps", "max_step")
    faults = refusal(write(tmp_path, text), "data.rwos=3", "plan.tf32=hihg")
    words = "\n".join(fault.problem for fault in faults)
    for part in ("bf17-mixed", "'hihg'", "model.widht", "trainer.max_step", "data.rwos"):
        assert part in words, part
    assert len(faults) == 5


def test_a_fault_of_every_run_of_a_sweep_is_told_once_and_none_starts(tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN.replace("width: 4", "width: 4\n  lrr: 1"))
    assert len(refusal(path, "seed=1,2", multirun=True)) == 1


OWN = """
import builtins
from support.training import Net

class Unmade(Net):
    def __init__(self, width):
        raise OSError("mine at the start")

class Unstepped(Net):
    def training_step(self, batch, batch_idx):
        raise getattr(builtins, "OSError")("mine in a step")
"""


@pytest.mark.parametrize(("name", "said"), [("Unmade", "mine at the start"), ("Unstepped", "mine in a step")])
def test_an_exception_in_the_users_code_keeps_its_traceback(name: str, said: str, tmp_path: Path) -> None:
    module = f"own_{name.lower()}"
    write(tmp_path, OWN, f"{module}.py")
    path = write(tmp_path, PLAIN.replace("support.training.Net", f"{module}.{name}"))
    ended = CliRunner().invoke(app, ["train", path, "callbacks=none", "run_dir=x"])
    assert ended.exit_code == 1
    raised: BaseException | None = ended.exception
    while not isinstance(raised, OSError):
        assert raised is not None
        raised = raised.__cause__
    assert said in str(raised)
    assert raised.__traceback__ is not None
