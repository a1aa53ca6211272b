"""``PlanCLI``: LightningCLI whose Trainer is built from a plan, and the config it leaves beside the run."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn, cast

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace

import lightning_mp
from lightning_mp.cli.training.application import RUN_DIR, beside, check_checkpoint, run_folder
from lightning_mp.cli.training.lightning_cli import plan_section
from lightning_mp.cli.training.lightning_cli.arguments import Arguments, command_of, config_files, flow, read
from lightning_mp.cli.training.lightning_cli.explain import REFUSALS, check_plugins, explain, note
from lightning_mp.cli.training.lightning_cli.plan_section import PIECES
from lightning_mp.cli.training.targets import ELSEWHERE
from lightning_mp.compat.lightning import (
    LightningArgumentParser,
    LightningCLI,
    LightningModule,
    SaveConfigCallback,
    Strategy,
    Trainer,
    get_filesystem,
    subcommands_of,
)
from lightning_mp.errors import Fault, Faults, MissingExtraError, PlanError, one_line
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.policy.load import HYDRA_KEYS
from lightning_mp.precision import MixedPrecisionPlan
from lightning_mp.strategies import registry
from lightning_mp.strategies.factory import trainer_kwargs

SUBJECT = "cli"
_HEADER = "lightning-mp=="
#: the sections that a Trainer is built from
_REGIME = ("strategy", "trainer")
_ASKS_FOR_HELP = re.compile(r"(-h|--help|--[\w.]+\.help)(=|$)")
_PLAN_HELP = "A precision, a preset's name, a YAML file, or a mapping of the fields below."
_STRATEGY_HELP = (
    f"A name of make_strategy ({', '.join(registry.STRATEGIES)}), or a mapping of 'name' and the strategy's keywords, "
    "'{name: fsdp2, wrap: Block}', or a class_path."
)
_USAGE_ERROR = 2
_CONFIG = "config.yaml"


class _PlanParsing:
    """LightningCLI's parser with the sections plan and strategy, and a help that has every field of a plan."""

    #: whether an object is built from another one, so that all have to be built together
    linked = False
    _has_plan = False

    def add_plan_arguments(self) -> None:
        parser = cast("LightningArgumentParser", self)
        parser.add_argument("--plan", type=Any, default="bf16-mixed", help=_PLAN_HELP)
        kind: Any = str | Strategy | dict[str, Any]
        parser.add_argument("--strategy", type=kind, default="auto", help=_STRATEGY_HELP)
        self._has_plan = True

    def add_class_arguments(self, theclass: type, nested_key: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if nested_key == "trainer":
            kwargs["skip"] = {*(kwargs.get("skip") or ()), "precision", "strategy"}
        return super().add_class_arguments(theclass, nested_key, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def link_arguments(self, source: Any, target: str, *args: Any, **kwargs: Any) -> None:
        self.linked = self.linked or "instantiate" in (*args, kwargs.get("apply_on"))
        super().link_arguments(source, target, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        text: str = super().format_help(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        pieces = [_help_of(f"plan.{name}", piece) for name, piece in PIECES.items()]
        return "\n".join([text, _help_of("plan", MixedPrecisionPlan), *pieces]) if self._has_plan else text


def _help_of(key: str, kind: type) -> str:
    """The options of a plan or of a piece of it, without the markup of their docstrings."""
    parser = ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    parser.add_class_arguments(kind, key)
    text = re.sub(rf"\n  --{key} CONFIG\s+Path to a configuration file\.", "", parser.format_help())
    return re.sub(r":\w+:`~?([^`]*)`", r"\1", text).replace("``", "")


class PlanCLI(LightningCLI):
    """LightningCLI with a plan: ``PlanCLI(MyModule, MyData)`` in a script, and all of LightningCLI's arguments.

    Its config has two sections more: ``plan``, with every argument of MixedPrecisionPlan, and ``strategy``, a name of
    make_strategy or a mapping of ``name`` and keywords. The Trainer is built by ``trainer_kwargs``. Without a logger
    the run writes to ``trainer.default_root_dir``, by default a new folder below ``runs/``.

    A config that cannot run is refused with exit status 2 and every fault, before a model is built; with
    ``parser_kwargs={"exit_on_error": False}`` as a PlanError. ``plan`` is the plan.
    """

    plan: MixedPrecisionPlan

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._exits = True
        self._policy: PrecisionPolicy | None = None
        self._strategy: Any = None
        self._home: Path | None = None
        self._stem = "cli"
        try:
            super().__init__(*args, **kwargs)
        except PlanError as error:
            if not self._exits:
                raise
            self._exit(error)

    # ------------------------------------------------------------------ the parser

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        if self.save_config_callback is SaveConfigCallback:
            self.save_config_callback = SavePlanConfig
        if not issubclass(self.parser_class, _PlanParsing):
            self.parser_class = type("PlanArgumentParser", (_PlanParsing, self.parser_class), {})
        self._exits = self._exits and bool(kwargs.get("exit_on_error", True))
        header = f"{_HEADER}{lightning_mp.__version__}"
        return super().init_parser(**{"dump_header": [header], **kwargs, "exit_on_error": False})

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        with Faults(SUBJECT) as faults:
            for key in self.trainer_defaults.keys() & ELSEWHERE.keys() - {"callbacks"}:
                faults.add(f"trainer_defaults with {key!r}", "what the plan leaves open", ELSEWHERE[key])
        cast("_PlanParsing", parser).add_plan_arguments()
        super().add_core_arguments_to_parser(parser)

    def setup_parser(self, *args: Any, **kwargs: Any) -> None:
        with _quiet():
            super().setup_parser(*args, **kwargs)

    def _add_instantiators(self) -> None:
        with _quiet():
            super()._add_instantiators()

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        given: Any = args.as_dict() if isinstance(args, Namespace) else sys.argv[1:] if args is None else args
        with _quiet():
            if isinstance(given, Mapping):
                self.config = self._parsed(parser, cast("Mapping[str, Any]", given))
                return
            words = list(cast("Sequence[str]", given))
            for key, piece in PIECES.items():
                if f"--plan.{key}.help" in words:
                    sys.stdout.write(_help_of(f"plan.{key}", piece))
                    raise SystemExit(0)
            if any(_ASKS_FOR_HELP.match(word) for word in words):
                with _as_faults():
                    parser.parse_args(words)
            self._stem = next((path.stem for path in config_files(words)), "cli")
            self.config = self._parsed(parser, words)

    def _parsed(self, parser: LightningArgumentParser, arguments: Sequence[str] | Mapping[str, Any]) -> Namespace:
        """What the parser makes of the arguments, and policy and strategy of that; every fault in one error."""
        with Faults(SUBJECT) as faults:
            commands = subcommands_of(self)
            command = command_of(arguments, commands, faults) if commands else None
        own = self._parser(command)
        with _as_faults():  # of default_config_files
            defaults = own.get_defaults(skip_validation=True)
        given = read(arguments, command, list(defaults.keys()), own.parser_mode, faults)
        readable = not faults.found
        if not readable:
            explain(own, given, None, faults)
        self._policy = plan_section.policy([("", defaults.get("plan")), *given.plan], given.places, faults)
        if given.prints or not readable:
            faults.raise_if_any()  # what is left would be printed, or cannot be parsed
        plan = "bf16-mixed" if self._policy is None else self._policy.to_dict()
        try:
            if isinstance(arguments, Mapping):
                found = dict(arguments)
                at = {**found[command], "plan": plan} if command in found else None
                parsed = parser.parse_object({**found, "plan": plan} if at is None else {**found, str(command): at})
            else:
                parsed = parser.parse_args([*given.words, "--plan", flow(plan)])
        except REFUSALS as error:
            good = explain(own, given, error, faults)
            with suppress(yaml.YAMLError, *REFUSALS):  # what it refuses is among the faults, or an object from Python
                words = [word for one in good if one.key.partition(".")[0] in _REGIME for word in one.words]
                self._check(self._regime_parser().parse_args(words), given, faults)
            faults.raise_if_any()
            raise
        self._check(parsed[command] if command else parsed, given, faults)
        faults.raise_if_any()
        return parsed

    def _check(self, regime: Namespace, given: Arguments, faults: Faults) -> None:
        """What neither parser nor plan can refuse by itself."""
        strategy: Any = regime.get("strategy")
        if isinstance(strategy, (str, dict)):
            keywords = _keywords(strategy)
            try:
                self._strategy = registry.build(keywords.pop("name", "auto"), self._policy, keywords)
            except PlanError as error:
                where = given.places.of("strategy")
                faults.extend(
                    Fault(f"strategy: {fault.given}{where}", fault.allowed, fault.fix) for fault in error.faults
                )
            except MissingExtraError as error:
                faults.add(f"strategy: {error}", "an installed strategy", "install it, or choose another")
        check_plugins(regime.get("trainer.plugins"), given.places, faults)
        check_checkpoint(regime.get("ckpt_path"), faults)

    def _parse_ckpt_path(self) -> None:
        with _quiet(), _as_faults("the checkpoint's hyperparameters: "):
            super()._parse_ckpt_path()

    # ------------------------------------------------------------------ the parts

    def instantiate_classes(self) -> None:
        try:
            self._instantiate_classes()
        except ValueError as error:  # jsonargparse lists all that it tried, whatever the class itself had to say
            if isinstance(error.__cause__, PlanError):
                raise error.__cause__ from None
            raise

    def _instantiate_classes(self) -> None:
        parser = self._parser(self.subcommand)
        with _quiet():
            if cast("_PlanParsing", parser).linked or parser.callback_keys:
                super().instantiate_classes()  # the Trainer needs what is built together with the model
                return
            # what a Trainer refuses is refused before there is a model
            regime: Any = self._regime_parser().instantiate_classes(self._section(self.config, _REGIME))
            self.config_init = self._whole(regime)
            self.trainer = self.instantiate_trainer()
            rest = [key for key in vars(self._section(self.config)) if key not in _REGIME]
            parts: Any = self.parser.instantiate_classes(self._whole(self._section(self.config, rest)))
        self._section(parts).update(regime)
        self.config_init = parts
        self.datamodule, self.model = self._get(parts, "data"), self._get(parts, "model")
        self._add_configure_optimizers_method_to_model(self.subcommand)

    def _section(self, config: Namespace, keys: Sequence[str] | None = None) -> Namespace:
        section: Namespace = config[self.subcommand] if self.subcommand else config
        return section if keys is None else Namespace({key: section[key] for key in keys}).clone()

    def _whole(self, section: Namespace) -> Namespace:
        return Namespace({"subcommand": self.subcommand, self.subcommand: section}) if self.subcommand else section

    def _regime_parser(self) -> LightningArgumentParser:
        parser = self.init_parser()
        cast("_PlanParsing", parser).add_plan_arguments()
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        return parser

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        arguments: dict[str, Any] = {**self._get(self.config_init, "trainer", default={}), **kwargs}
        assert self._policy is not None
        self.plan = MixedPrecisionPlan.from_policy(self._policy)
        strategy = self._get(self.config_init, "strategy") if self._strategy is None else self._strategy
        self._set_home(arguments)
        for callback in _listed(arguments.get("callbacks")):
            if self._home is not None and getattr(callback, "run_dir", "") is None:
                callback.run_dir = self._home
        known = signature(Trainer).parameters
        ours = {key: value for key, value in arguments.items() if key in known}
        try:
            return super().instantiate_trainer(**{**kwargs, **trainer_kwargs(self.plan, strategy=strategy, **ours)})
        except PlanError:
            raise
        except Exception as error:  # Lightning's own, of several kinds
            given = f"trainer: {type(error).__name__}: {one_line(error)}"
            fault = Fault(given, "what Lightning's Trainer takes", "fix the trainer or strategy section")
            raise PlanError([fault], SUBJECT) from error

    # ------------------------------------------------------------------ where a run writes

    def _set_home(self, arguments: dict[str, Any]) -> None:
        """Without a logger: the root folder, which is a new one where none is named."""
        logs = arguments.get("logger") not in (False, []) and not arguments.get("barebones")
        if logs or arguments.get("fast_dev_run"):
            return
        root = arguments.get("default_root_dir") or os.environ.get(RUN_DIR)
        self._home = Path(root or Path("runs") / f"{self._stem}-{time.strftime('%Y%m%d-%H%M%S')}")
        arguments["default_root_dir"] = str(self._home)
        self._section(self.config)["trainer"]["default_root_dir"] = str(self._home)

    def _run_subcommand(self, subcommand: str) -> None:
        with run_folder(self._home) if self._home else nullcontext():
            super()._run_subcommand(subcommand)

    # ------------------------------------------------------------------ refusals

    def _exit(self, error: PlanError) -> NoReturn:
        parser = getattr(self, "parser", None)
        name = parser.prog if parser is not None else Path(sys.argv[0]).name
        sys.stderr.write(f"{name}: {error.listed()}\n")
        raise SystemExit(_USAGE_ERROR) from None


def _keywords(strategy: str | dict[str, Any]) -> dict[str, Any]:
    """A strategy's name and keywords, also of Hydra's form (the package's own groups)."""
    if isinstance(strategy, str):
        return {"name": strategy}
    if str(strategy.get("_target_", "make_strategy")).rpartition(".")[2] != "make_strategy":
        return strategy  # in which _target_ is an unknown keyword
    return {key: value for key, value in strategy.items() if key not in (*HYDRA_KEYS, "plan")}


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(cast("list[Any]", value)) if isinstance(value, list) else [value]


@contextmanager
def _quiet() -> Generator[None]:
    """Without what jsonargparse has to say of names that Lightning calls it by."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(?s)\s*(By default only one Json|.*deprecated in v4)", DeprecationWarning)
        yield


@contextmanager
def _as_faults(before: str = "") -> Generator[None]:
    """What jsonargparse refuses is a PlanError."""
    try:
        yield
    except ArgumentError as error:
        faults = Faults(SUBJECT)
        note(error, Arguments(), (), faults)
        found = [Fault(f"{before}{fault.given}", fault.allowed, fault.fix) for fault in faults.found]
        raise PlanError(found, SUBJECT) from error


class SavePlanConfig(SaveConfigCallback):
    """Writes the resolved config beside the run: ``config.yaml`` of a fit, else ``config_<command>.yaml``.

    A file that a PlanCLI wrote is replaced, or left to the run that a fit goes on from (``config_2.yaml``, …); any
    other is left as it is.

    Raises:
        PlanError: such a file is in the way.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.save_to_log_dir and not self.already_saved:
            command = "fit" if trainer.state.fn is None else trainer.state.fn.value
            if command != "fit" and self.config_filename == _CONFIG:
                self.config_filename = f"config_{command}.yaml"
            folder = trainer.log_dir  # every rank asks: rank 0 tells the others
            assert folder is not None
            if command == "fit" and (trainer.ckpt_path or self.config.get("ckpt_path")):
                self._go_on_in(folder)
            path = f"{folder}/{self.config_filename}"
            if not self.overwrite and trainer.strategy.broadcast(trainer.is_global_zero and _is_foreign(path)):
                given = f"a run in {folder}, where {self.config_filename} is not a PlanCLI's"
                fix = "give the run a folder of its own, --trainer.default_root_dir runs/x, or move the file away"
                raise PlanError([Fault(given, "a folder without it", fix)], SUBJECT)
            self.overwrite = True
        with _quiet():
            super().setup(trainer, pl_module, stage)

    def _go_on_in(self, folder: str) -> None:
        files = get_filesystem(folder)
        if not self.overwrite and files.isfile(f"{folder}/{self.config_filename}"):
            self.config_filename = beside(self.config_filename, lambda name: files.isfile(f"{folder}/{name}"))


def _is_foreign(path: str) -> bool:
    files = get_filesystem(path)
    if not files.isfile(path):
        return False
    with files.open(path, "r") as file:
        return not str(file.readline()).startswith(f"# {_HEADER}")
