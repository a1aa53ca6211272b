"""LightningCLI's parser with a plan: the sections ``plan`` and ``strategy``, and a help that has every field."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection
from typing import Any, cast

import yaml
from jsonargparse import ArgumentParser

from lightning_mp.cli.training.lightning_cli.forms import PIECES, load, settle
from lightning_mp.compat.lightning import LightningArgumentParser, Strategy
from lightning_mp.precision import MixedPrecisionPlan
from lightning_mp.strategies.registry import STRATEGIES

#: what of the Trainer is not the Trainer's to say under a plan
THE_PLANS = ("precision", "strategy")
_STRATEGY_HELP = (
    f"A name of make_strategy ({', '.join(STRATEGIES)}), or a mapping of 'name' and the strategy's keywords, "
    "'{name: fsdp2, wrap: Block}', or a class_path."
)


class PlanParsing:
    """Mixed into a parser class of LightningCLI by :func:`plan_parser`."""

    #: dotted keys of a config that are left out: they were refused already
    dropped: Collection[str] = ()
    #: whether an object is built from another one, so that all have to be built together
    linked = False
    _has_plan = False

    def add_plan_arguments(self) -> None:
        """Add ``plan``, every argument of MixedPrecisionPlan, and ``strategy``."""
        parser = cast("LightningArgumentParser", self)
        parser.add_class_arguments(MixedPrecisionPlan, "plan", sub_configs=True)
        kind: Any = str | Strategy | dict[str, Any]
        parser.add_argument("--strategy", type=kind, default="auto", help=_STRATEGY_HELP)
        self._has_plan = True

    def add_class_arguments(self, theclass: type, nested_key: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if nested_key == "trainer":
            kwargs["skip"] = {*(kwargs.get("skip") or ()), *THE_PLANS}
        return super().add_class_arguments(theclass, nested_key, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def link_arguments(self, source: Any, target: str, *args: Any, **kwargs: Any) -> None:
        self.linked = self.linked or "instantiate" in (*args, kwargs.get("apply_on"))
        super().link_arguments(source, target, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Any:
        loaded = load(content)
        settled = settle(loaded, self.dropped)
        text = content if settled == loaded else yaml.safe_dump(settled, sort_keys=False)
        return super().parse_string(text, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def parse_object(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        given = settle(obj, self.dropped) if isinstance(obj, dict) else obj
        return super().parse_object(given, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        text: str = super().format_help(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return _plain("\n".join([text, *map(_fields, PIECES)])) if self._has_plan else text


def plan_parser(base: type[LightningArgumentParser]) -> type[LightningArgumentParser]:
    """The parser class ``base`` with a plan."""
    return base if issubclass(base, PlanParsing) else type("PlanArgumentParser", (PlanParsing, base), {})


def _fields(piece: str) -> str:
    parser = ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    parser.add_class_arguments(PIECES[piece], f"plan.{piece}")
    # the piece itself is listed among the plan's fields
    return re.sub(rf"\n  --plan\.{piece} CONFIG\s+Path to a configuration file\.", "", parser.format_help())


def _plain(text: str) -> str:
    """A docstring's text without its markup."""
    return re.sub(r":\w+:`~?([^`]*)`", r"\1", text).replace("``", "")
