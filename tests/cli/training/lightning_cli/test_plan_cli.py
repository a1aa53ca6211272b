"""``lightning-mp cli`` and ``PlanCLI`` train what ``lightning-mp train`` trains, from LightningCLI's own YAML."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from typer.testing import CliRunner

from lightning_mp import LossScaling, MixedPrecisionPlan, PlanError
from lightning_mp.cli import app
from lightning_mp.cli.training.lightning_cli import PlanCLI
from lightning_mp.strategies.fsdp2.strategy import PlanFSDP2Strategy
from support import launching, training
from support.lightning_cli import PLAIN, TYPED, Net, Rows, composed, fit, refusal
from support.training import losses, readings, write


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)


def checkpoint(folder: str | Path) -> dict[str, Any]:
    (path,) = (Path(folder) / "checkpoints").glob("*=*.ckpt")
    return torch.load(path, weights_only=True)


def home(folder: str) -> tuple[str, str]:
    return "--trainer.default_root_dir", folder


# ---------------------------------------------------------------------- the same run


def test_a_run_is_the_run_of_lightning_mp_train_bit_for_bit(tmp_path: Path) -> None:
    scaling = {"init_scale": 2.0**24, "growth_interval": 2}  # the first steps overflow
    plan = {"precision": "16-mixed", "pins": {"*norm*": "fp32"}, "loss_scaling": scaling}
    steps = {"max_steps": -1, "max_epochs": 4}
    ours = yaml.safe_load(PLAIN)
    fit("--config", write(tmp_path, yaml.safe_dump({**ours, "plan": plan, "trainer": {**ours["trainer"], **steps}})),
        *home("cli"))  # fmt: skip
    theirs = yaml.safe_load(training.PLAIN)
    sections = {
        "plan": plan,
        "model": {"_target_": "support.lightning_cli.Net", "width": 4},
        "data": {"_target_": "support.lightning_cli.Rows", "rows": 12},
        "trainer": {**theirs["trainer"], **steps},
    }
    training.run(write(tmp_path, yaml.safe_dump(sections), "train.yaml"), "run_dir=train")
    one, other = checkpoint("cli"), checkpoint("train")
    assert one["MixedPrecisionPlan"] == other["MixedPrecisionPlan"]
    assert one["MixedPrecisionPlan"]["steps"]["skipped_steps"] > 0
    assert all(torch.equal(one["state_dict"][name], value) for name, value in other["state_dict"].items())
    assert losses("cli") == losses("train")


def test_the_resolved_config_is_beside_the_run_and_runs_again(tmp_path: Path) -> None:
    options = ("--plan", "longspec", "--plan.loss_scaling.init_scale", "8", *home("out"))
    (said,) = fit("--config", write(tmp_path, PLAIN), *options)
    assert said == "out: 3 steps"
    saved = yaml.safe_load((tmp_path / "out/config.yaml").read_text())
    scaling = saved["plan"]["loss_scaling"]
    assert (scaling["init_scale"], scaling["max_scale"], scaling["hysteresis"]) == (8.0, float("inf"), 2)
    assert (saved["model"]["init_args"]["lr"], saved["trainer"]["default_root_dir"]) == (0.1, "out")
    assert (tmp_path / "out/run.json").exists()
    fit("--config", "out/config.yaml", *home("again"))
    assert losses("again") == losses("out")
    fit("--config", "out/config.yaml")  # in its own place: that file is replaced by an equal one
    assert yaml.safe_load((tmp_path / "out/config.yaml").read_text()) == saved


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN.replace("max_steps: 3", "max_epochs: 2"))
    fit("--config", path, *home("whole"))
    fit("--config", path, *home("out"), "--trainer.max_epochs", "1")
    (last,) = Path("out/checkpoints").glob("*.ckpt")
    first = Path("out/config.yaml").read_bytes()
    fit("--config", "out/config.yaml", "--trainer.max_epochs", "2", "--ckpt_path", str(last))
    assert [row["step"] for row in readings("out")] == [0, 1, 2, 3, 4, 5]
    assert losses("out")[:3] == losses("whole")[:3]
    fit("--config", "out/config.yaml", "--trainer.max_epochs", "3", "--ckpt_path", str(last))
    assert Path("out/config.yaml").read_bytes() == first
    resumed = [yaml.safe_load(Path(f"out/config_{number}.yaml").read_text()) for number in (2, 3)]
    assert [(config["ckpt_path"], config["trainer"]["max_epochs"]) for config in resumed] == [
        (str(last), 2),
        (str(last), 3),
    ]


def test_a_run_without_logger_and_folder_gets_one_of_its_own(tmp_path: Path) -> None:
    fit("--config", write(tmp_path, PLAIN))
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("run-")
    assert {file.name for file in folder.iterdir()} >= {"config.yaml", "metrics.jsonl", "checkpoints"}


def test_with_a_logger_everything_is_in_its_folder(tmp_path: Path) -> None:
    logger = "{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs, name: x}}"
    fit("--config", write(tmp_path, PLAIN), "--trainer.logger", logger)
    assert {file.name for file in Path("logs/x/version_0").iterdir()} >= {"config.yaml", "metrics.jsonl", "checkpoints"}
    assert not Path("runs").exists()


def test_a_file_of_another_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN, "config.yaml")
    (fault,) = refusal("fit", "--config", path, *home(str(tmp_path)))
    assert "config.yaml is not a PlanCLI's" in fault.given
    assert Path(path).read_text() == PLAIN


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_the_other_commands_run_under_the_plan(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    monkeypatch.setattr(Net, "on_predict_batch_end", lambda _, outputs, *__: seen.append(outputs.dtype), raising=False)
    cli = PlanCLI(args=[command, "--config", write(tmp_path, PLAIN), *home("out")], seed_everything_default=0)
    assert cli.trainer.precision_plugin is cli.plan
    assert seen == [torch.bfloat16] * 3 * (command == "predict")
    assert Path(f"out/config_{command}.yaml").exists()


# ---------------------------------------------------------------------- the plan and the strategy

DEEPSPEED = MixedPrecisionPlan("16-mixed", loss_scaling=LossScaling.deepspeed(hysteresis=3))
_SCALING = "lightning_mp.LossScaling.deepspeed"
FORMS: dict[str, tuple[str, tuple[str, ...], MixedPrecisionPlan]] = {
    "a precision": ("plan: 16-mixed", (), MixedPrecisionPlan("16-mixed")),
    "a preset": ("plan: longspec", (), MixedPrecisionPlan.preset("longspec")),
    "a file beside the config": ("plan: parts/plan.yaml", (), DEEPSPEED),
    "class_path": (
        f"plan:\n  precision: 16-mixed\n  loss_scaling: {{class_path: {_SCALING}, init_args: {{hysteresis: 3}}}}",
        (),
        DEEPSPEED,
    ),
    "a word of a field": (
        "plan: {nonfinite: raise, checkpointing: '*layer*'}",
        (),
        MixedPrecisionPlan(nonfinite="raise", checkpointing="*layer*"),
    ),
    "pins with outputs": (
        "plan: {pins: [{pattern: '*norm*', dtype: fp32, output: pin}]}",
        (),
        MixedPrecisionPlan(pins=[{"pattern": "*norm*", "dtype": "fp32", "output": "pin"}]),
    ),
    "an option": ("plan: 16-mixed", ("--plan", "bf16-true"), MixedPrecisionPlan("bf16-true")),
    "an option that is a file": ("plan: 32-true", ("--plan", "conf/parts/plan.yaml"), DEEPSPEED),
    "an option of a field, beside a word": ("plan: 16", ("--plan.tf32=high",), MixedPrecisionPlan("16", tf32="high")),
    "options of fields": (
        "plan: {precision: 32-true, pins: {a: fp32}}",
        ("--plan.precision=16-mixed", "--plan.loss_scaling.init_scale", "8", "--plan.pins.x.y", "bf16"),
        MixedPrecisionPlan("16-mixed", loss_scaling={"init_scale": 8}, pins={"a": "fp32", "x.y": "bf16"}),
    ),
    "an option of a pin, over a list": (
        "plan: {pins: [{pattern: a, dtype: fp32}]}",
        ("--plan.pins.b=fp16",),
        MixedPrecisionPlan(pins={"a": "fp32", "b": "fp16"}),
    ),
    "an option over a part of a piece": (
        "plan: {precision: 16-mixed, loss_scaling: {init_scale: 4, hysteresis: 2}}",
        ("--plan.loss_scaling.init_scale", "8"),
        MixedPrecisionPlan("16-mixed", loss_scaling={"init_scale": 8, "hysteresis": 2}),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_plan_may_be_written_as(name: str, tmp_path: Path) -> None:
    text, options, expected = FORMS[name]
    target = f"_target_: lightning_mp.MixedPrecisionPlan\nprecision: 16-mixed\nloss_scaling:\n  _target_: {_SCALING}\n"
    write(tmp_path, f"{target}  hysteresis: 3\n", "conf/parts/plan.yaml")
    path = write(tmp_path, TYPED.replace("plan: bf16-mixed", text), "conf/run.yaml")
    cli = composed("--config", path, *options, typed=True)
    assert cli.plan.policy == expected.policy
    assert cli.trainer.precision_plugin is cli.plan


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("fsdp2", PlanFSDP2Strategy),
        ("{name: fsdp2, wrap: Linear}", PlanFSDP2Strategy),
        ("{_target_: lightning_mp.make_strategy, name: fsdp2, plan: '${plan}'}", PlanFSDP2Strategy),
        ("{class_path: lightning.pytorch.strategies.DDPStrategy}", DDPStrategy),
    ],
)
def test_a_strategy_may_be_written_as(strategy: str, kind: type, tmp_path: Path) -> None:
    path = write(tmp_path, f"strategy: {strategy}\n{TYPED}")
    assert type(composed("--config", path, typed=True).trainer.strategy) is kind


def test_a_config_may_have_a_section_for_each_command(tmp_path: Path) -> None:
    sections = {"fit": {**yaml.safe_load(TYPED), "plan": "16-mixed"}, "test": {"plan": "32-true"}}
    path = write(tmp_path, yaml.safe_dump(sections))
    cli = PlanCLI(Net, Rows, args=["--config", path, "fit", *home("out")])
    assert (cli.plan.policy.precision, cli.trainer.global_step) == ("16-mixed", 3)


# ---------------------------------------------------------------------- a script of one's own


class _Own(PlanCLI):
    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.add_lightning_class_args(EarlyStopping, "stop")
        parser.set_defaults({"stop.monitor": "loss"})
        parser.link_arguments("data.rows", "model.width")


def test_what_lightningcli_offers_is_there(tmp_path: Path) -> None:
    path = write(tmp_path, TYPED.replace("{width: 4}", "{lr: 0.5}"))
    with pytest.warns(UserWarning, match="will be overridden by `_Own.configure_optimizers`"):
        cli = composed("--config", path, "--optimizer=Adam", "--optimizer.lr=0.25", cli=_Own, typed=True)
    assert cli.model.layer.out_features == 12
    assert any(isinstance(callback, EarlyStopping) for callback in cli.trainer.callbacks)
    optimizer = cli.model.configure_optimizers()
    assert (type(optimizer), optimizer.defaults["lr"]) == (torch.optim.Adam, 0.25)


def test_a_checkpoint_loads_by_its_hyperparameters(tmp_path: Path) -> None:
    PlanCLI(Net, Rows, args=["fit", "--config", write(tmp_path, TYPED), *home("out")])
    (path,) = Path("out/checkpoints").glob("*.ckpt")
    assert Net.load_from_checkpoint(path).layer.out_features == 4


def test_arguments_may_come_from_python() -> None:
    sections = {**yaml.safe_load(TYPED), "plan": "16-mixed"}
    cli = PlanCLI(Net, Rows, args=sections, run=False)
    assert cli.plan.policy.precision == "16-mixed"


def test_interpolation_is_resolved_in_lightningclis_mode_for_it(tmp_path: Path) -> None:
    path = write(tmp_path, TYPED.replace("plan: bf16-mixed", "plan: {precision: '${name}'}") + "name: 16-mixed\n")

    class Named(PlanCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_argument("--name", type=str)

    kwargs = {"parser_mode": "omegaconf"}
    cli = Named(Net, Rows, args=["--config", path], run=False, parser_kwargs=kwargs)
    assert cli.plan.policy.precision == "16-mixed"


def test_what_the_plan_says_is_no_default_of_the_trainer() -> None:
    with pytest.raises(PlanError) as error:
        PlanCLI(
            Net, trainer_defaults={"precision": 16, "max_steps": 3}, args=[], parser_kwargs={"exit_on_error": False}
        )
    (fault,) = error.value.faults
    assert (fault.given, fault.fix) == ("trainer_defaults with 'precision'", "set plan.precision instead")


def test_a_checkpoint_of_a_class_that_is_gone_is_refused(tmp_path: Path) -> None:
    torch.save({"hyper_parameters": {"width": 4, "_class_path": "support.lightning_cli.Gone"}}, "old.ckpt")
    (fault,) = refusal("fit", "--config", write(tmp_path, PLAIN), "--ckpt_path", "old.ckpt")
    assert fault.given.startswith("the checkpoint's hyperparameters: model: ")
    assert "support.lightning_cli.Gone" in fault.given


def test_a_script_ends_with_status_2_and_every_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, TYPED.replace("width", "widht").replace("max_steps", "max_step"))
    with pytest.raises(SystemExit) as ended:
        PlanCLI(Net, Rows, args=["fit", "--config", path], parser_kwargs={"prog": "train.py"})
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "train.py: 2 faults"
    assert ["model.widht" in lines[1], "trainer.max_step" in lines[2], len(lines)] == [True, True, 3]


# ---------------------------------------------------------------------- the command


def test_the_command_says_every_fault_and_ends_with_status_2(tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN.replace("bf16-mixed", "bf17-mixed").replace("max_steps", "max_step"))
    result = CliRunner().invoke(app, ["cli", "fit", "--config", path, "--model.widht", "3"])
    assert result.exit_code == 2
    first, *faults = result.stderr.splitlines()
    assert first == "lightning-mp cli: 3 faults"
    assert len(faults) == 3
    assert not isinstance(result.exception, BaseException) or isinstance(result.exception, SystemExit)


def test_without_jsonargparse_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    monkeypatch.delitem(sys.modules, "lightning_mp.cli.training.lightning_cli")
    result = CliRunner().invoke(app, ["cli", "fit"])
    assert result.exit_code == 2
    assert "pip install 'lightning-mp[cli]'" in result.stderr


@pytest.mark.parametrize("options", [(), ("--trainer.max_steps", "abc"), ("--trainer.devices", "none_at_all")])
def test_what_a_run_sets_process_wide_is_put_back(options: tuple[str, ...], tmp_path: Path) -> None:
    arguments = ("--config", write(tmp_path, PLAIN), *home("out"), *options)
    before = (dict(os.environ), list(sys.path), list(warnings.filters), Path.cwd())
    if options:
        refusal("fit", *arguments)
    else:
        fit(*arguments)
    assert (dict(os.environ), list(sys.path), list(warnings.filters), Path.cwd()) == before


@pytest.mark.gloo
@pytest.mark.slow
def test_two_processes_share_a_run_and_its_folder(tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN)
    command = [sys.executable, "-m", "lightning_mp", "cli", "fit", "--config", path, "--trainer.devices", "2"]
    surroundings = launching.environment(PYTHONPATH=str(Path(__file__).parents[3]))
    options = ["--strategy", "{name: fsdp2, wrap: Linear}", "--plan", "longspec", "--plan.loss_scaling.init_scale", "8"]
    ended = launching.run([[*command, *options]], tmp_path / "log", [surroundings], timeout=120)
    assert (ended.codes, ended.left) == ((0,), False), ended.output
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(losses(folder)) == 3
    assert json.loads((folder / "run.json").read_text())["machine"]["processes"] == 2
    assert yaml.safe_load((folder / "config.yaml").read_text())["strategy"] == {"name": "fsdp2", "wrap": "Linear"}
