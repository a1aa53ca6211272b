"""A policy as a table; with a module, also the number of modules that each rule covers."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from html import escape
from textwrap import fill

from torch import nn

from lightning_mp.errors import Faults, counted
from lightning_mp.modules import checkpointing, fp8, pins
from lightning_mp.policy import LossScaling, NonFinite, PrecisionPolicy

#: the width of the table, in columns
WIDTH = 96

Rows = list[tuple[str, str]]


def rows(policy: PrecisionPolicy, module: nn.Module | None, layers: Sequence[fp8.FP8Layer] = ()) -> Rows:
    """Return (subject, text) rows of a policy. With ``module`` they name the modules that each rule covers.

    ``layers`` are the FP8 layers of a run; without them they are selected here.
    """
    if policy.fp8 is not None and module is not None and not layers:
        covered = [member.module for member in pins.resolve(module, policy.pins, Faults()).covered]
        layers = fp8.select(module, policy.fp8, covered, Faults())[0]
    return [
        ("precision", policy.precision),
        ("stored", _stored(policy)),
        ("computed", _computed(policy)),
        ("reduced", f"gradients are summed across ranks in {policy.reduce_dtype}"),
        *([("fp8", f"{policy.fp8.recipe}: {policy.fp8}")] if policy.fp8 else []),
        *(("", line) for line in ([fp8.summary(layers), *fp8.table(layers)] if layers else ())),
        *_pins(policy, module),
        ("loss scaling", _loss_scaling(policy)),
        ("non-finite", _written(policy.nonfinite)),
        ("TF32", "torch's own setting" if policy.tf32 is None else repr(policy.tf32)),
        ("checkpointing", _checkpointing(policy, module)),
    ]


def _pins(policy: PrecisionPolicy, module: nn.Module | None) -> Rows:
    pin_map, table = pins.PinMap(), Rows()
    if module is not None:
        pin_map = pins.resolve(module, policy.pins, Faults(), policy.storage_dtype, policy.buffer_dtype)
    for pin in policy.pins:
        names = [member.name for member in pin_map.covered if member.pin is pin]
        output = "" if pin.output is None else f", output {pin.output}"
        output += " operands, sum and result fp32" if pin.accumulate else ""
        count = "" if module is None else f": {_counted(names)}"
        table.append(("pin", f"{pin.pattern!r} {pin.dtype}{output}{count}"))
    for pattern, model in dict.fromkeys((tensor.pattern, tensor.model) for tensor in pin_map.declared):
        names = dict.fromkeys(tensor.name for tensor in pin_map.declared if tensor.pattern == pattern)
        table.append(("pin", f"{pattern!r} fp32, as {model} declares: {_counted(list(names))}"))
    return table or [("pins", "none")]


def _checkpointing(policy: PrecisionPolicy, module: nn.Module | None) -> str:
    rule = policy.checkpointing
    if rule is None or module is None:
        return "none" if rule is None else repr(rule)
    chosen = set(checkpointing.select(module, rule, Faults()))
    return f"{rule}: {_counted([name for name, part in module.named_modules() if part in chosen])}"


def _counted(names: list[str]) -> str:
    """Return a count with names: ``2 modules, net.1, net.4``, or ``12 modules, model.layers.*.norm`` for many."""
    # a number in a name is the index of a layer
    forms = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) if len(names) > 3 else name for name in names))
    shown = ", ".join(forms[:3]) + (f" and {len(forms) - 3} more" if len(forms) > 3 else "")
    return f"{counted(len(names), 'module')}, {shown}" if names else "no module"


def announcement(policy: PrecisionPolicy, module: nn.Module, layers: Sequence[fp8.FP8Layer] = ()) -> list[str]:
    """Return the first lines of a run: 3 to 5 of at most 160 characters. ``layers``: the FP8 layers."""
    covered = [f"pin {text}" for name, text in _pins(policy, module) if name == "pin"]
    if policy.checkpointing is not None:
        covered.append(f"checkpointing {_checkpointing(policy, module)}")
    lines = [
        repr(policy).replace(type(policy).__name__, "MixedPrecisionPlan", 1),
        f"  {_computed(policy)}; {_stored(policy)}",
        *([f"  {'; '.join(covered)}"] if covered else []),
        *([f"  fp8 {policy.fp8.recipe}: {fp8.summary(layers)}"] if policy.fp8 else []),
        *([f"  loss scaling {_loss_scaling(policy)}"] if policy.loss_scaling else []),
        f"  non-finite {_written(policy.nonfinite)}",
    ]
    return [line if len(line) <= 160 else f"{line[:159]}…" for line in lines]


def as_text(table: Rows) -> str:
    """Return the rows in two columns, at most ``WIDTH`` wide."""
    indent = max(len(name) for name, _ in table) + 2
    wrap = partial(fill, width=WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap(text, initial_indent=f"{name:{indent}}") for name, text in table)


def as_html(table: Rows) -> str:
    """Return the rows as an escaped HTML table."""
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in table)
    return f"<table>{cells}</table>"


def _stored(policy: PrecisionPolicy) -> str:
    stored, buffers = policy.storage_dtype, policy.buffer_dtype
    if buffers is None:
        buffers = f"floating ones {stored}" if stored != "fp32" else "as the model has them"
    return f"parameters, gradients and optimizer state {stored}; buffers {buffers}"


def _computed(policy: PrecisionPolicy) -> str:
    if policy.precision == "auto":
        return "chosen for the device when the run begins"
    if policy.mixed:
        fp8 = "" if policy.fp8 is None else ", fp8 where converted"
        return f"matrix products and convolutions {policy.compute_dtype}{fp8}, the rest as torch.autocast decides"
    return f"everything {policy.compute_dtype}"


def _loss_scaling(policy: PrecisionPolicy) -> str:
    rule = policy.loss_scaling
    if rule is None:
        return "torch's rule, where the mode is fp16" if policy.precision == "auto" else "none"
    return _written(rule) if rule.dynamic else f"init_scale={rule.init_scale!r}, dynamic=False"


def _written(rule: LossScaling | NonFinite) -> str:
    """Return every field of ``rule`` that is not None or False, defaults included."""
    on = {name: value for name, value in asdict(rule).items() if value is not None and value is not False}
    return ", ".join(f"{name}={value!r}" for name, value in on.items())
