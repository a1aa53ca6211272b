"""``PlanCLI``: LightningCLI whose Trainer is built from a plan, and the config it leaves beside the run."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn, cast

from jsonargparse import ArgumentError, Namespace

import lightning_mp
from lightning_mp.cli.training.application import RUN_DIR, told
from lightning_mp.cli.training.lightning_cli import checks
from lightning_mp.cli.training.lightning_cli.forms import settle
from lightning_mp.cli.training.lightning_cli.given import (
    Given,
    asks_for_help,
    command_of,
    config_files,
    gather,
    prints_config,
    settled,
)
from lightning_mp.cli.training.lightning_cli.parser import PlanParsing, plan_parser
from lightning_mp.cli.training.targets import ELSEWHERE
from lightning_mp.compat.lightning import (
    LightningArgumentParser,
    LightningCLI,
    LightningModule,
    SaveConfigCallback,
    Trainer,
    get_filesystem,
    subcommands_of,
)
from lightning_mp.errors import Fault, Faults, PlanError, one_line
from lightning_mp.precision import MixedPrecisionPlan
from lightning_mp.strategies.factory import make_strategy, trainer_kwargs

_HEADER = "lightning-mp=="
#: the sections that a Trainer is built from
_REGIME = ("plan", "strategy", "trainer")
_USAGE_ERROR = 2
_CONFIG = "config.yaml"


_Parse = Callable[[Given, Sequence[str]], Namespace]


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
        self.parser_class = plan_parser(self.parser_class)
        self._exits = self._exits and bool(kwargs.get("exit_on_error", True))
        header = f"{_HEADER}{lightning_mp.__version__}"
        return super().init_parser(**{"dump_header": [header], **kwargs, "exit_on_error": False})

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        faults = Faults(checks.SUBJECT)
        for key in self.trainer_defaults.keys() & ELSEWHERE.keys() - {"callbacks"}:
            faults.add(f"trainer_defaults with {key!r}", "what the plan leaves open", ELSEWHERE[key])
        faults.raise_if_any()
        cast("PlanParsing", parser).add_plan_arguments()
        super().add_core_arguments_to_parser(parser)

    def setup_parser(self, *args: Any, **kwargs: Any) -> None:
        with _quiet():
            super().setup_parser(*args, **kwargs)

    def _add_instantiators(self) -> None:
        with _quiet():
            super()._add_instantiators()

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        with _quiet():
            if isinstance(args, (Mapping, Namespace)):
                values = args.as_dict() if isinstance(args, Namespace) else dict(cast("Mapping[str, Any]", args))
                self.config = self._checked(parser, lambda _, bad: parser.parse_object(settle(values, bad)), values)
                return
            words = list(cast("Sequence[str]", sys.argv[1:] if args is None else args))
            if asks_for_help(words):
                with _told_as_faults():
                    self.config = parser.parse_args(words)
                return
            self._stem = next((path.stem for path in config_files(words)), "cli")
            self.config = self._checked(parser, lambda found, bad: parser.parse_args(settled(words, found, bad)), words)

    def _checked(self, parser: LightningArgumentParser, parse: _Parse, given: Any) -> Any:
        """What ``parse`` makes of what is given: each time without the keys that are known to be wrong."""
        faults = Faults(checks.SUBJECT)
        commands = subcommands_of(self)
        command = command_of(given, commands, faults) if commands else None
        faults.raise_if_any()
        own = self._parser(command)
        with _told_as_faults():  # of default_config_files
            known = list(own.get_defaults(skip_validation=True).keys())
        found = gather(given, command, own.parser_mode, faults)
        last = prints_config(given) or len(faults.found) > 0  # what is left cannot be parsed, or would be printed
        bad = checks.check(found, known, faults)
        if last:
            faults.raise_if_any()
        while True:
            for one in (parser, own):
                cast("PlanParsing", one).dropped = bad
            try:
                parsed = parse(found, bad)
                break
            except (ArgumentError, TypeError, ValueError, OSError) as error:  # all of these come from its actions
                key = checks.tell(error, found, bad, faults)
                if key is None or key in bad:
                    faults.raise_if_any()
                    raise
                bad.append(key)
        faults.raise_if_any()
        return parsed

    def _parse_ckpt_path(self) -> None:
        with _quiet(), _told_as_faults("the checkpoint's hyperparameters: "):
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
            if cast("PlanParsing", parser).linked or parser.callback_keys:
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
        parser = self.parser_class()
        cast("PlanParsing", parser).add_plan_arguments()
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        return parser

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        faults = Faults(checks.SUBJECT)
        arguments: dict[str, Any] = {**self._get(self.config_init, "trainer", default={}), **kwargs}
        self.plan = self._get(self.config_init, "plan")
        strategy = self._strategy(faults)
        self._settle_home(arguments)
        for callback in _listed(arguments.get("callbacks")):
            if self._home is not None and getattr(callback, "run_dir", "") is None:
                callback.run_dir = self._home
        known = signature(Trainer).parameters
        ours = {key: value for key, value in arguments.items() if key in known}
        try:
            regime = trainer_kwargs(self.plan, **{"strategy": strategy, **ours})
            return super().instantiate_trainer(**{**kwargs, **regime})
        except PlanError as error:
            faults.extend(error.faults)
        except Exception as error:  # Lightning's own, of several kinds
            given = f"trainer: {type(error).__name__}: {one_line(error)}"
            faults.add(given, "what Lightning's Trainer takes", "mend the trainer or strategy section")
        faults.raise_if_any()
        raise AssertionError

    def _strategy(self, faults: Faults) -> Any:
        given = self._get(self.config_init, "strategy")
        if not isinstance(given, (str, Mapping)):
            return given
        keywords = dict(cast("Mapping[str, Any]", given)) if isinstance(given, Mapping) else {"name": given}
        try:
            return make_strategy(keywords.pop("name", "auto"), self.plan, **keywords)
        except PlanError as error:
            faults.extend(error.faults)
        faults.raise_if_any()
        raise AssertionError

    # ------------------------------------------------------------------ where a run writes

    def _settle_home(self, arguments: dict[str, Any]) -> None:
        """Without a logger: the root folder, which is a new one where none is named."""
        logs = arguments.get("logger") not in (False, []) and not arguments.get("barebones")
        if logs or arguments.get("fast_dev_run"):
            return
        root = arguments.get("default_root_dir") or os.environ.get(RUN_DIR)
        self._home = Path(root or Path("runs") / f"{self._stem}-{time.strftime('%Y%m%d-%H%M%S')}")
        arguments["default_root_dir"] = str(self._home)
        self._section(self.config)["trainer"]["default_root_dir"] = str(self._home)

    def _run_subcommand(self, subcommand: str) -> None:
        with told(self._home) if self._home else nullcontext():
            super()._run_subcommand(subcommand)

    # ------------------------------------------------------------------ refusals

    def _exit(self, error: PlanError) -> NoReturn:
        parser = getattr(self, "parser", None)
        name = parser.prog if parser is not None else Path(sys.argv[0]).name
        sys.stderr.write(f"{name}: {error.listed()}\n")
        raise SystemExit(_USAGE_ERROR) from None


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(cast("list[Any]", value)) if isinstance(value, list) else [value]


@contextmanager
def _quiet() -> Generator[None]:
    """Without what jsonargparse has to say of names that Lightning calls it by."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(?s)\s*(By default only one Json|.*deprecated in v4)", DeprecationWarning)
        yield


@contextmanager
def _told_as_faults(before: str = "") -> Generator[None]:
    """What jsonargparse refuses is a PlanError."""
    try:
        yield
    except ArgumentError as error:
        faults = Faults(checks.SUBJECT)
        checks.tell(error, Given(), (), faults)
        told_so = [Fault(f"{before}{fault.given}", fault.allowed, fault.fix) for fault in faults.found]
        raise PlanError(told_so, checks.SUBJECT) from error


class SavePlanConfig(SaveConfigCallback):
    """Writes the resolved config beside the run: ``config.yaml`` of a fit, else ``config_<command>.yaml``.

    A file that a PlanCLI wrote is replaced; any other is left as it is.

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
            path = f"{folder}/{self.config_filename}"
            if not self.overwrite and trainer.strategy.broadcast(trainer.is_global_zero and _is_foreign(path)):
                faults = Faults(checks.SUBJECT)
                fix = "give the run a folder of its own, --trainer.default_root_dir runs/x, or move the file away"
                faults.add(f"a run in {folder}, where {self.config_filename} is another's", "a folder without one", fix)
                faults.raise_if_any()
            self.overwrite = True
        with _quiet():
            super().setup(trainer, pl_module, stage)


def _is_foreign(path: str) -> bool:
    files = get_filesystem(path)
    if not files.isfile(path):
        return False
    with files.open(path, "r") as file:
        return not str(file.readline()).startswith(f"# {_HEADER}")
