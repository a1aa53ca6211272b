"""What LightningCLI cannot run is refused before a model is built: every fault, near names, where it was written."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.callbacks import EarlyStopping

from lightning_mp.cli.training.lightning_cli import PlanCLI
from lightning_mp.errors import PlanError
from support.lightning_cli import PLAIN, Net, composed, refusal
from support.training import write

_PRECISION = "class_path: lightning.pytorch.plugins.HalfPrecision"
_FILE_OF_TRAIN = "_target_: support.lightning_cli.Net"
#: what is written in place of a part of PLAIN, and the one fault: (given, do) must be found in it
BAD: dict[str, tuple[tuple[str, str], str, str]] = {
    "misspelt key of the plan": (("precision:", "precison:"), "plan: unknown key precison (run.yaml:2)", "'precision'"),
    "misspelt precision": (("bf16-mixed", "bf16-mxed"), "precision='bf16-mxed' (run.yaml:2)", "'bf16-mixed'"),
    "misspelt key of a piece": (
        ("precision: bf16-mixed", "precision: 16-mixed\n  loss_scaling:\n    init_scal: 8"),
        "unknown key loss_scaling.init_scal (run.yaml:4)",
        "'init_scale'",
    ),
    "misspelt dtype of a pin": (
        ("precision: bf16-mixed", "precision: 16-mixed\n  pins:\n    '*norm*': fp23"),
        "pin '*norm*': dtype='fp23' (run.yaml:4)",
        "'fp32'",
    ),
    "misspelt constructor": (
        (
            "precision: bf16-mixed",
            "precision: 16-mixed\n  loss_scaling:\n    class_path: lightning_mp.LossScaling.depspeed",
        ),
        "loss_scaling.class_path: lightning_mp.LossScaling.depspeed (run.yaml:4)",
        "name one of these",
    ),
    "plan that is a misspelt word": (
        ("plan:\n  precision: bf16-mixed", "plan: longspc"),
        "plan='longspc' (run.yaml:1)",
        "'longspec'",
    ),
    "plan that is a number": (("plan:\n  precision: bf16-mixed", "plan: 17"), "plan: 17 (run.yaml:1)", "precision:"),
    "misspelt argument of the model": (
        ("width: 4", "width: 4\n    lrr: 1"),
        "unknown key model.init_args.lrr (run.yaml:7)",
        "'lr'",
    ),
    "argument that is not below init_args": (
        ("  init_args:\n    width: 4", "  init_args: {width: 4}\n  lr: 1"),
        "unknown key model.lr (run.yaml:6)",
        "below init_args",
    ),
    "misspelt class": (("cli.Net", "cli.Nett"), "(run.yaml:4): 'support.lightning_cli' has no 'Nett'", "'Net'"),
    "misspelt module": (("support.lightning_cli.Net", "suport.lightning_cli.Net"), "no module 'suport'", "'support'"),
    "form of lightning-mp train": (
        ("class_path: support.lightning_cli.Net", _FILE_OF_TRAIN),
        "model._target_ (run.yaml:4)",
        "class_path: support.lightning_cli.Net",
    ),
    "misspelt Trainer argument": (("max_steps", "max_step"), "trainer.max_step (run.yaml:14)", "'max_steps'"),
    "precision in the Trainer": (
        ("devices: 1", "precision: 16"),
        "trainer.precision (run.yaml:13)",
        "set plan.precision instead",
    ),
    "strategy in the Trainer": (("devices: 1", "strategy: ddp"), "trainer.strategy (run.yaml:13)", "strategy section"),
    "precision among the plugins": (
        ("devices: 1", f"plugins:\n  - {_PRECISION}\n    init_args: {{precision: 16-true}}"),
        "trainer.plugins: lightning.pytorch.plugins.HalfPrecision (run.yaml:13)",
        "set plan.precision instead",
    ),
    "value of another type": (("max_steps: 3", "max_steps: many"), "trainer.max_steps (run.yaml:14): Expected", "help"),
    "argument of another type": (("width: 4", "width: wide"), "model (run.yaml:3): Problem with", "help of --model"),
    "missing argument": (("    width: 4\n", "    lr: 1\n"), "are required: width", "write model.init_args.width"),
    "no model": (("model:", "modell:"), "unknown key modell (run.yaml:3)", "'model'"),
    "misspelt plan": (("plan:", "plann:"), "unknown key plann (run.yaml:1)", "'plan'"),
    "no Lightning module": (
        ("support.lightning_cli.Net\n  init_args:\n    width: 4", "torch.nn.Flatten"),
        "torch.nn.Flatten does not correspond to a subclass of LightningModule",
        "",
    ),
    "misspelt callback": (
        ("callbacks.TrainingHealth", "callbacks.TrainingHelth"),
        "trainer.callbacks.0.class_path: lightning_mp.callbacks.TrainingHelth (run.yaml:19)",
        "'TrainingHealth'",
    ),
    "misspelt callback of Lightning": (
        ("lightning_mp.callbacks.TrainingHealth\n    init_args:\n      report: false", "EarlyStoping"),
        "trainer.callbacks (run.yaml:18)",
        "'EarlyStopping'",
    ),
    "misspelt argument of a callback": (
        ("report: false", "reprt: false"),
        "unknown key trainer.callbacks.0.init_args.reprt (run.yaml:21)",
        "'report'",
    ),
    "callback that refuses": (("report: false", "every_n_steps: 0"), "every_n_steps=0", "every_n_steps=1"),
    "devices that are none": (("devices: 1", "devices: none_at_all"), "trainer: TypeError", "fix the trainer"),
    "unknown strategy": (("plan:", "strategy: fsdp3\nplan:"), "strategy 'fsdp3' (run.yaml:1)", "'fsdp2'"),
    "unknown strategy keyword": (
        ("plan:", "strategy:\n  name: fsdp2\n  rap: Block\nplan:"),
        "unknown keyword 'rap'",
        "'wrap'",
    ),
    "checkpoint that is not there": (("plan:", "ckpt_path: gone.ckpt\nplan:"), "ckpt_path=gone.ckpt", "check the path"),
    "seed that is none": (("plan:", "seed_everything: abc\nplan:"), "seed_everything (run.yaml:1)", "help"),
    "no YAML": (("plan:", "plan: ["), "run.yaml", "fix the file"),
    "no mapping": ((PLAIN, "- plan"), "run.yaml', a list", "write 'plan:'"),
}


@pytest.fixture(autouse=True)
def nothing_is_built_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    built = Net.built
    yield
    assert Net.built == built
    assert {path.suffix for path in tmp_path.iterdir()} <= {".yaml"}


@pytest.mark.parametrize("name", BAD)
def test_a_fault_is_named_with_its_place_and_a_way_out(name: str, tmp_path: Path) -> None:
    (old, new), given, fix = BAD[name]
    assert old in PLAIN
    (fault,) = refusal("fit", "--config", write(tmp_path, PLAIN.replace(old, new, 1)))
    assert given in fault.given
    assert fix in fault.fix


ARGUMENTS: dict[tuple[str, ...], tuple[str, str]] = {
    ("--plan", "fp61"): ("plan='fp61' (on the command line)", "'fp16'"),
    ("--plan", "16-mixd"): ("plan='16-mixd'", "'16-mixed'"),
    ("--plan.precison=16-mixed",): ("unknown key precison (on the command line)", "'precision'"),
    ("--plan.pins.*norm*", "fp23"): ("pin '*norm*': dtype='fp23' (on the command line)", "'fp32'"),
    ("--plan.loss_scaling.init_scale", "8"): ("loss_scaling with precision='bf16-mixed'", "16-mixed"),
    ("--strategy", "fsdp3"): ("strategy 'fsdp3' (on the command line)", "'fsdp2'"),
    ("--strategy.name=fsdp2", "--strategy.rap", "B"): ("unknown keyword 'rap'", "'wrap'"),
    ("--trainer.max_stps", "1"): ("unknown key trainer.max_stps (on the command line)", "'max_steps'"),
    ("--trainer.max_steps", "many"): ("trainer.max_steps (on the command line): Expected", "help"),
    ("--trainer.precision=16-mixed",): ("trainer.precision (on the command line)", "set plan.precision instead"),
    ("--trainer.plugins=16-mixed",): ("trainer.plugins: 16-mixed (on the command line)", "set plan.precision instead"),
    ("--model.widht", "1"): ("unknown key model.widht (on the command line)", "'width'"),
    ("--model", "support.lightning_cli.Nett"): ("has no 'Nett'", "'Net'"),
    ("--modl.width", "3"): ("unknown key modl (on the command line)", "'model'"),
    ("--ckpt_path", "gone.ckpt"): ("ckpt_path=gone.ckpt", "check the path"),
    ("plan=bf16",): ("plan=bf16", "--plan bf16"),
    ("strategy=ddp",): ("strategy=ddp", "--strategy ddp"),
    ("other.yaml",): ("other.yaml", "--config other.yaml"),
    ("--config", "rum.yaml"): ("config 'rum.yaml', which is no file", "'run.yaml'"),
    ("--print_config", "--trainer.max_stps", "1"): ("trainer.max_stps", "'max_steps'"),
}


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=" ".join)
def test_a_bad_option_is_named_with_a_way_out(arguments: tuple[str, ...], tmp_path: Path) -> None:
    given, fix = ARGUMENTS[arguments]
    (fault,) = refusal("fit", "--config", write(tmp_path, PLAIN), *arguments)
    assert given in fault.given
    assert fix in fault.fix


def test_all_faults_of_file_and_options_come_together(tmp_path: Path) -> None:
    text = PLAIN.replace("width", "widht").replace("max_steps", "max_step").replace("devices: 1", "devices: {}")
    path = write(tmp_path, f"strategy: fsdp3\n{text}")
    faults = refusal("fit", "--config", path, "--plan.precision=17", "--data.rwos=3", "--foo", "3")
    words = "\n".join(fault.given for fault in faults)
    parts = ("fsdp3", "precision=17", "model.init_args.widht", "required: width", "max_step", "devices", "rwos", "foo")
    for part in parts:
        assert part in words, part
    assert len(faults) == len(parts)


@pytest.mark.parametrize(
    ("arguments", "given", "fix"),
    [
        (["fti", "--config", "run.yaml"], "command 'fti'", "'fit'"),
        (["--config", "fit"], "no command", "fit --config run.yaml"),
        (["fit"], "no model", "'model:'"),
    ],
)
def test_a_missing_command_or_model_is_named(arguments: list[str], given: str, fix: str) -> None:
    (fault,) = refusal(*arguments)
    assert given in fault.given
    assert fix in fault.fix


def test_a_model_whose_own_code_refuses_is_reported_as_a_fault(tmp_path: Path) -> None:
    model = "lightning_mp.demo.language_model.CausalLM\n  init_args:\n    architecture: lama\n    config: {}"
    text = PLAIN.replace("support.lightning_cli.Net\n  init_args:\n    width: 4", model)
    (fault,) = refusal("fit", "--config", write(tmp_path, text))
    assert "lama" in fault.given
    assert "Traceback" not in fault.given


def test_a_mapping_from_python_is_looked_at_in_the_same_way() -> None:
    sections = {"plan": "bf17-mixed", "model": {"widht": 3}, "trainer": {"max_step": 3}}
    with pytest.raises(PlanError) as error:
        PlanCLI(Net, args=sections, run=False, parser_kwargs={"exit_on_error": False})
    words = [fault.given for fault in error.value.faults]
    assert [any(part in word for word in words) for part in ("bf17", "widht", "max_step")] == [True] * 3


def test_a_typed_model_is_looked_at_by_its_arguments(tmp_path: Path) -> None:
    path = write(tmp_path, "plan: bf16-mixed\nmodel:\n  widht: 3\ndata: {rows: 4}\n")
    with pytest.raises(PlanError) as error:
        composed("--config", path, typed=True)
    (fault,) = error.value.faults
    assert "unknown key model.widht (run.yaml:3)" in fault.given
    assert "'width'" in fault.fix


def test_objects_from_python_may_stand_beside_a_fault() -> None:
    sections = {"model": {"width": "wide"}, "trainer": {"callbacks": [EarlyStopping("loss")]}}
    with pytest.raises(PlanError) as error:
        PlanCLI(Net, args=sections, run=False, parser_kwargs={"exit_on_error": False})
    assert "width" in str(error.value)


def test_hydras_form_of_a_strategy_that_is_not_the_packages_own_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, f"strategy: {{_target_: lightning.pytorch.strategies.DDPStrategy}}\n{PLAIN}")
    (fault,) = refusal("fit", "--config", path)
    assert "'_target_'" in fault.given
