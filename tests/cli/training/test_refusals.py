"""What cannot run is refused before a model is built: every fault, with near names and where it was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_mp.errors import Fault
from support.training import PLAIN, Net, refusal, write

#: what is written in place of a line of PLAIN, and the one fault: (given, do) must be found in it
BAD: dict[str, tuple[tuple[str, str], str, str]] = {
    "misspelt key of the plan": (
        ("precision: bf16", "precison: bf16"),
        "unknown key precison (run.yaml:2)",
        "'precision'",
    ),
    "misspelt precision": (("bf16-mixed", "bf16-mxed"), "precision='bf16-mxed' (run.yaml:2)", "'bf16-mixed'"),
    "misspelt key of a piece": (
        ("precision: bf16-mixed", "precision: 16-mixed\n  loss_scaling:\n    init_scal: 8"),
        "unknown key loss_scaling.init_scal (run.yaml:4)",
        "'init_scale'",
    ),
    "bad value of a piece": (
        ("precision: bf16-mixed", "precision: 16-mixed\n  loss_scaling:\n    growth_factor: 0.5"),
        "growth_factor=0.5 (run.yaml:4)",
        "2.0",
    ),
    "bad pin of a list": (
        ("precision: bf16-mixed", "pins:\n  - {pattern: '*', dtype: fp32}\n  - {pattern: a, dtype: int8}"),
        "pin 'a': dtype='int8' (run.yaml:4)",
        "",
    ),
    "misspelt argument of the model": (
        ("width: 4", "width: 4\n  lrr: 1"),
        "unknown key model.lrr (run.yaml:6)",
        "'lr'",
    ),
    "misspelt class": (("training.Net", "training.Nett"), "(run.yaml:4): 'support.training' has no 'Nett'", "'Net'"),
    "misspelt module": (("support.training.Net", "suport.training.Net"), "no module 'suport'", "'support'"),
    "misspelt submodule": (("support.training.Net", "support.trainin.Net"), "has no 'trainin'", "'training'"),
    "target that is no class": (("training.Net", "training.PLAIN"), "a str, which cannot be called", "package"),
    "misspelt Trainer argument": (("max_steps", "max_step"), "trainer.max_step (run.yaml:12)", "'max_steps'"),
    "precision in the Trainer": (
        ("devices: 1", "precision: 16"),
        "trainer.precision (run.yaml:11)",
        "set plan.precision instead",
    ),
    "strategy in the Trainer": (("devices: 1", "strategy: ddp"), "trainer.strategy (run.yaml:11)", "strategy section"),
    "missing value": (("width: 4", "width: ???"), "model.width: ??? (run.yaml:5)", "model.width=..."),
    "missing argument": (("  width: 4\n", ""), "model (run.yaml:3) without 'width'", "model.width=..."),
    "missing value elsewhere": (("width: 4", "width: ${w}\nw: ???"), "w: ??? (run.yaml:6)", "w=..."),
    "loop": (
        ("width: 4", "width: ${model.lr}\n  lr: 1\nx: ${x}"),
        "x (run.yaml:7), which leads back",
        "break the loop",
    ),
    "interpolation to nowhere": (("width: 4", "width: ${data.row}"), "'data.row' not found", "'data.rows'"),
    "no model": (("model:", "modell:"), "no model (run.yaml:3)", "call it model: 'modell'"),
    "no plan": (("plan:", "plann:"), "no plan (run.yaml:1)", "call it plan: 'plann'"),
    "nothing like a plan": (("plan:", "xyz:"), "no plan", "plan=bf16"),
    "callback without target": (("plan:", "callbacks: {x: 3}\nplan:"), "callbacks.x: 3", "_target_"),
    "callback that is none": (
        ("plan:", "callbacks: {x: {_target_: datetime.date, year: 1, month: 1, day: 1}}\nplan:"),
        "callbacks.x: a date",
        "_target_",
    ),
    "callback that refuses": (
        ("plan:", "callbacks: {x: {_target_: lightning_mp.callbacks.TrainingHealth, every_n_steps: 0}}\nplan:"),
        "callbacks.x: every_n_steps=0",
        "",
    ),
    "unknown strategy": (("plan:", "strategy: fsdp3\nplan:"), "strategy 'fsdp3'", "'fsdp2'"),
    "unknown strategy keyword": (
        ("plan:", "strategy: {name: fsdp2, rap: Block}\nplan:"),
        "unknown keyword 'rap'",
        "'wrap'",
    ),
    "checkpoint that is not there": (("plan:", "ckpt_path: gone.ckpt\nplan:"), "ckpt_path=gone.ckpt", "check the path"),
    "run_dir that does not resolve": (("plan:", "run_dir: ${nowhere}\nplan:"), "run_dir (run.yaml:1)", "target"),
    "no YAML": (("plan:", "plan: ["), "run.yaml", "fix the file"),
    "misspelt option": (("plan:", "defaults: [{data: library_txt}]\nplan:"), "data=library_txt", "'library_text'"),
    "misspelt group": (
        ("plan:", "defaults:\n  - dat: fp16\nplan:"),
        "dat: fp16 (run.yaml:2), which is no group",
        "'data'",
    ),
    "config that is not there": (("plan:", "defaults: [nosuch]\nplan:"), "In 'run.yaml': Could not load 'nosuch'", ""),
    "mandatory choice": (("data:", "defaults:\n  - data: ???\nold:"), "data: ??? (run.yaml:7)", "data=..."),
}


@pytest.fixture(autouse=True)
def nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", BAD)
def test_a_fault_is_named_with_its_place_and_a_way_out(name: str, tmp_path: Path) -> None:
    (old, new), given, fix = BAD[name]
    assert old in PLAIN
    built = Net.built
    (fault,) = refusal(write(tmp_path, PLAIN.replace(old, new, 1)))
    assert Net.built == built
    assert given in fault.given
    assert fix in fault.fix


#: a DeepSpeed JSON, where in a config it is given, and the one fault
JSONS: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "a comment": (
        '{\n  // half\n  "fp16": {"enabled": true}\n}',
        ("plan", "strategy"),
        "line 2, column 3",
        "JSON has none",
    ),
    "an auto that nothing resolves": (
        '{"fp16": {"enabled": false}, "bf16": {"enabled": "auto"}}',
        ("plan",),
        "bf16.enabled='auto' with fp16.enabled=False",
        "write",
    ),
    "a misspelt key": ('{"fp17": {"enabled": true}}', ("plan", "strategy"), "unknown key fp17", "'fp16'"),
}


@pytest.mark.parametrize(("name", "section"), [(name, section) for name in JSONS for section in JSONS[name][1]])
def test_a_deepspeed_json_is_read_before_a_model_is_built(name: str, section: str, tmp_path: Path) -> None:
    text, _, given, fix = JSONS[name]
    path = write(tmp_path, text, "ds.json")
    if section == "plan":
        plan = f"plan:\n  _target_: lightning_mp.MixedPrecisionPlan.from_deepspeed\n  config: {path}"
        config = PLAIN.replace("plan:\n  precision: bf16-mixed", plan)
    else:
        config = PLAIN.replace("bf16-mixed", "16-mixed") + f"strategy: {{name: deepspeed_zero1, config: {path}}}\n"
    built = Net.built
    (fault,) = refusal(write(tmp_path, config))
    assert Net.built == built
    assert given in fault.given
    assert fix in fault.fix


ARGUMENTS = {
    "plan=fp61": ("plan=fp61", "'fp16'"),
    "plan=fp32,bf16": ("several values, 'plan=fp32,bf16'", "add -m"),
    "plan.precison=16-mixed": ("no key 'precison' in plan", "'precision'"),
    "plan.precision=17-mixed": ("precision='17-mixed' (on the command line)", "'16-mixed'"),
    "max_steps=10": ("no key 'max_steps' in the config", "'trainer.max_steps'"),
    "trainer.precision=16": ("no key 'precision' in trainer", "plan.precision"),
    "plan.pins={'*norm*': fp32}": ("argument \"plan.pins={'*norm*': fp32}\"", "[{pattern:'*norm*',dtype:fp32}]"),
    "trainer.max_stps=1": ("no key 'max_stps' in trainer", "'max_steps'"),
    "model.widht=1": ("no key 'widht' in model", "'width'"),
    "mdel=gpt2_tiny": ("no key 'mdel' in the config", "'model'"),
    "callbacks.training_helth.every_n_steps=1": ("no key 'training_helth' in callbacks", "'training_health'"),
    "strategy={name: fsdp2, rap: 3}": ("unknown keyword 'rap'", "'wrap'"),
    "seed=abc": ("seed='abc'", "seed=0"),
    "foo": ("argument 'foo'", "foo=..."),
    "seed=[1": ("argument 'seed=[1'", "quotes"),
    "experiment=lama_tiny": ("experiment=lama_tiny", "'llama_tiny'"),
    "trainer.max_steps=many": ("trainer.max_steps='many' (on the command line)", "trainer.max_steps=10,"),
    "trainer.inference_mode=maybe": ("trainer.inference_mode='maybe'", "trainer.inference_mode=true,"),
    "trainer.devices=none_at_all": ("trainer: ", "fix the trainer"),
}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_bad_argument_is_named_with_a_way_out(argument: str, tmp_path: Path) -> None:
    given, fix = ARGUMENTS[argument]
    built = Net.built
    (fault,) = refusal(write(tmp_path, PLAIN), argument)
    assert Net.built == built
    assert given in fault.given
    assert fix in fault.fix


def test_a_file_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    write(tmp_path, PLAIN)
    (fault,) = refusal("rum.yaml")
    assert fault.given == "config 'rum.yaml', which is no file"
    assert "'run.yaml'" in fault.fix


def test_the_folder_of_a_run_is_no_config_but_holds_one(tmp_path: Path) -> None:
    write(tmp_path, PLAIN, "runs/x/config.yaml")
    (fault,) = refusal("runs/x")
    assert "'runs/x/config.yaml'" in fault.fix
    (tmp_path / "runs" / "x" / "config.yaml").unlink()
    (tmp_path / "runs" / "x").rmdir()
    (tmp_path / "runs").rmdir()


def test_a_file_of_lightning_cli_is_told_from_one_of_this_command(tmp_path: Path) -> None:
    given = PLAIN.replace("_target_: support.training.Net\n  width: 4", "class_path: support.training.Net")
    (fault,) = refusal(write(tmp_path, given))
    assert fault.given == "model.class_path (run.yaml:4), which is LightningCLI's"
    assert "_target_" in fault.fix


def test_all_faults_of_file_and_arguments_come_together(tmp_path: Path) -> None:
    text = PLAIN.replace("bf16-mixed", "bf17-mixed").replace("width", "widht").replace("max_steps", "max_step")
    faults = refusal(write(tmp_path, text), "plann=fp16", "data.rwos=3", "foo")
    words = "\n".join(fault.given for fault in faults)
    for part in ("bf17-mixed", "model.widht", "without 'width'", "max_step", "plann", "rwos", "'foo'"):
        assert part in words, part
    assert len(faults) == 7


def test_a_fault_of_every_run_of_a_sweep_is_told_once_and_none_starts(tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN.replace("width: 4", "width: 4\n  lrr: 1"))
    (fault,) = refusal(path, "seed=1,2", multirun=True)
    assert "model.lrr" in fault.given


def test_a_fault_in_a_file_of_a_group_is_named_with_that_file(tmp_path: Path) -> None:
    write(tmp_path, "defaults: [fp16]\nloss_scaling:\n  init_scal: 8\n", "plan/ours.yaml")
    (fault,) = refusal(write(tmp_path, PLAIN), "plan=ours")
    assert "loss_scaling.init_scal (ours.yaml:3)" in fault.given


def test_a_model_whose_own_code_refuses_is_reported_as_a_fault(tmp_path: Path) -> None:
    (fault,) = refusal(
        write(
            tmp_path,
            PLAIN.replace("support.training.Net", "lightning_mp.demo.language_model.CausalLM").replace(
                "width: 4", "architecture: lama\n  config: {}"
            ),
        )
    )
    assert fault.given.startswith("model: ValueError: Unrecognized model identifier: lama")


def test_parts_that_do_not_fit_are_reported_as_a_fault(tmp_path: Path) -> None:
    (fault,) = refusal(write(tmp_path, PLAIN.replace("data:", "unused:")), "run_dir=out")
    assert "train_dataloader" in fault.given


def test_a_text_that_is_too_short_is_reported_as_a_fault(tmp_path: Path) -> None:
    text = write(tmp_path, "short", "short.txt")
    parts = ("model=llama_tiny", "data=library_text", f"data.text={text}")
    (fault,) = refusal(write(tmp_path, PLAIN), *parts, "run_dir=out")
    assert "short.txt" in fault.given


def test_what_is_no_lightning_module_is_refused(tmp_path: Path) -> None:
    (fault,) = refusal(write(tmp_path, PLAIN.replace("support.training.Net\n  width: 4", "torch.nn.Flatten")))
    assert fault == Fault("model: a Flatten", "a LightningModule", "give the _target_ of one")
