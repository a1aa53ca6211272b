"""Declared dtypes of a module, and the judgement of the observed ones.

A plan, or one of Lightning's plugins, declares dtypes. ``differences`` compares them with the observed
dtypes and names the likely cause of each difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_mp.compat.lightning import (
    DDPStrategy,
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    SingleDeviceStrategy,
    Strategy,
    Trainer,
    ddp_hooks,
)
from lightning_mp.errors import Faults, pinning
from lightning_mp.modules import fp8, pins
from lightning_mp.numerics.dtypes import describe, dtype_name
from lightning_mp.plan.run import PlanBase
from lightning_mp.policy import STORAGE_DTYPES, PrecisionPolicy
from lightning_mp.policy.precision_policy import DTYPES_OF
from lightning_mp.precision_audit.observer import Observed, Ran

_STOCK = (MixedPrecision, HalfPrecision, DoublePrecision)
AS_STORED = "as stored"
_HALF = frozenset(("bf16", "fp16", "fp8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """The dtypes that a run declares, as short names. A field that is ``None`` is not declared and not judged.

    Attributes:
        by: the plan or plugin, for messages.
        storage: the dtype of stored parameters.
        compute: the dtype of matrix products.
        reduce: the dtype of gradient sums over ranks, or ``AS_STORED``.
        state: the dtype of optimizer state, or ``AS_STORED``.
        autocast: True if torch's autocast lists keep norms and look-ups in fp32.
        frozen: True if frozen parameters have to be stored in ``storage`` too.
        tf32: True if fp32 products have to run in TF32, ``None`` if torch's switches decide.
        pins: module name to the dtype of its pin.
        products: module name to ``"fp8"``, or to the half dtype of operands whose sum is fp32.
        notes: sentences for the foot of the report.
    """

    by: str
    #: True for a plan: advice then names its fields, and callbacks otherwise
    plan: bool = False
    storage: str | None = None
    compute: str | None = None
    reduce: str | None = None
    state: str | None = None
    autocast: bool = False
    frozen: bool = False
    tf32: bool | None = None
    pins: Mapping[str, str] = field(default_factory=dict[str, str])
    products: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()

    def declared(self, name: str) -> str | None:
        """Return the dtype of the module's products: its pin's, or the run's. ``None`` if not declared."""
        pin = self.products.get(name) or self.pins.get(name)
        return pin or ("tf32" if self.tf32 and self.compute == "fp32" else self.compute)

    def stored(self, name: str) -> str | None:
        """Return the dtype of the module's parameters: its pin's, or the run's. ``None`` if not declared."""
        return self.pins.get(name) or self.storage


def by_trainer(trainer: Trainer, modules: Mapping[str, nn.Module]) -> Declaration:
    """Return the declaration of the Trainer's plugin on its strategy. ``modules``: by name."""
    plugin = trainer.precision_plugin
    if isinstance(plugin, PlanBase):
        return by_policy(plugin.policy, modules, trainer.strategy.root_device, plugin.engine)
    return by_stock(plugin, trainer.strategy, modules)


def by_policy(
    policy: PrecisionPolicy, modules: Mapping[str, nn.Module], device: torch.device, engine: Any = None
) -> Declaration:
    """Return the declaration of a policy for ``modules``, whose root has the name ``""``.

    ``engine`` belongs to a run under way and has resolved the pins. Without it they are resolved here.
    """
    facts, faults = describe(device), Faults("audit")
    if engine:
        pin_map = engine.pin_map
    else:
        pin_map = pins.resolve(modules[""], policy.pins, faults, policy.storage_dtype, policy.buffer_dtype)
    stored, products = pin_map.dtypes(), {id(member.module): member.pin.dtype for member in pin_map.wide}
    pinned = {id(member.module): member.pin.dtype for member in pin_map.members}
    for module in (member.module for member in pin_map.declared):
        if {stored.get(id(parameter)) for parameter in module.parameters(recurse=False)} == {"fp32"}:
            pinned[id(module)] = "fp32"
    converted: Iterable[nn.Module] = ()
    if engine:
        converted = engine.converted
    elif policy.fp8 is not None:
        covered = [member.module for member in pin_map.covered]
        converted = fp8.select(modules[""], policy.fp8, covered, faults)[1]
    products |= dict.fromkeys(map(id, converted), "fp8")
    without_tf32 = f"tf32={policy.tf32!r} changes nothing on {facts.name}: it has no TF32"
    return Declaration(
        by=f"MixedPrecisionPlan({policy.precision!r})",
        plan=True,
        storage=policy.storage_dtype,
        compute=policy.compute_dtype,
        reduce=policy.reduce_dtype,
        state=AS_STORED,
        autocast=policy.mixed,
        frozen=True,
        tf32=None if policy.tf32 is None or not facts.tf32 else policy.tf32 != "highest",
        pins={name: pinned[id(module)] for name, module in modules.items() if id(module) in pinned},
        products={name: products[id(module)] for name, module in modules.items() if id(module) in products},
        notes=(without_tf32,) if policy.tf32 is not None and not facts.tf32 else (),
    )


def by_stock(plugin: Precision, strategy: Strategy | None, modules: Mapping[str, nn.Module]) -> Declaration:
    """Return the declaration of one of Lightning's own plugins, as Lightning documents it.

    For an unknown plugin, such as FSDP's and DeepSpeed's, the declaration has the pins alone.
    """
    precision = str(plugin.precision)
    by, carried = f"{type(plugin).__name__}({precision!r})", carried_pins(modules)
    _, half = DTYPES_OF.get(precision, (None, None))
    if half is None or not (isinstance(plugin, _STOCK) or type(plugin) is Precision):
        note = f"what {type(plugin).__name__} declares for a module is not known here: dtypes are shown, not judged"
        return Declaration(by=by, **carried, notes=(note,))
    mixed = precision.endswith("-mixed")
    storage = "fp32" if mixed else half
    own_sum = isinstance(strategy, DDPStrategy) and ddp_hooks(strategy)[0] is None
    return Declaration(
        by=by,
        **carried,
        compute=half,
        storage=storage,
        reduce=AS_STORED if own_sum or isinstance(strategy, SingleDeviceStrategy) else None,
        state=AS_STORED,
        autocast=mixed,
        frozen=isinstance(plugin, HalfPrecision),  # casts all; elsewhere frozen weights need no fp32 copy
    )


def carried_pins(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return ``pins`` and ``products`` of modules to which a plan or ``DtypePinning`` was applied."""
    states = {"pins": "_lmp_pin", "products": "_lmp_wide"}
    return {
        field: {name: dtype_name(vars(module)[key].dtype) for name, module in modules.items() if vars(module).get(key)}
        for field, key in states.items()
    }


@dataclass(frozen=True, slots=True)
class Difference:
    """A declared dtype that a module does not have. ``what`` is the column of the report."""

    what: str
    declared: str
    found: str
    reason: str
    fix: str


def joined(names: Iterable[str]) -> str | None:
    """Return the names in one string, such as ``"bf16, fp32"``; ``None`` for no name."""
    return ", ".join(sorted(names)) or None


def computed(seen: Observed) -> set[str]:
    """Return the dtypes of the module's products, norms and look-ups; without any, of all its operators."""
    telling = [ran for ran in seen.ran if ran.kind in ("product", "norm", "lookup")]
    return {dtype for ran in telling or seen.ran for dtype in ran.dtypes}


def differences(name: str, seen: Observed, declaration: Declaration) -> Iterator[Difference]:
    """Yield the differences between ``seen`` and ``declaration`` for the module ``name``."""
    stored, pinned = declaration.stored(name), name in declaration.pins
    if "fp64" in seen.param and stored == "fp32" and not pinned:
        return  # float64 stays float64 where fp32 is stored
    judged = seen.trained | (seen.frozen if declaration.frozen or pinned else set())
    state, reduce = (stored if dtype == AS_STORED else dtype for dtype in (declaration.state, declaration.reduce))
    half = stored == "fp32" and declaration.compute != "fp32"
    wanted, wrong, cause = _computation(name, seen, declaration)
    wrong_storage = bool(stored and judged - {stored})
    #: column, declared dtype, observed dtypes, true if they differ, likely cause
    rows: list[tuple[str, str | None, set[str], object, _Cause]] = [
        ("param", stored, judged, wrong_storage, _LOST_PIN if pinned else _NO_MASTERS if half else _CAST),
        # state follows the parameter, and mostly computation
        ("compute", wanted, wrong, wrong and not (wrong_storage and computed(seen) <= seen.param | {stored}), cause),
        ("optimizer_state", state, seen.state, seen.state - {state} and not wrong_storage, _STATE),
        ("reduce", reduce, seen.reduce, seen.reduce - {reduce}, _REDUCED),
    ]
    for what, declared, dtypes, differs, cause in rows:
        if declared is not None and differs:
            observed = joined(dtypes) or ""
            yield Difference(what, declared, observed, cause.reason, _fix(cause, name, observed, declaration))


def _fix(cause: _Cause, name: str, observed: str, declaration: Declaration) -> str:
    """Return the advice of ``cause``, with the pin that would declare the observed dtype if there is one."""
    dtype = observed if cause.pin == _FOUND else cause.pin
    scaled = declaration.compute == "fp16" and declaration.autocast
    if dtype not in STORAGE_DTYPES or not name or (dtype == "fp16" and scaled and not declaration.plan):
        return cause.fix
    return f"{cause.fix}, or pin it: {pinning([name], under_plan=declaration.plan, dtype=dtype)}"


# ---------------------------------------------------------------------- products and other operators


def _computation(name: str, seen: Observed, declaration: Declaration) -> tuple[str | None, set[str], _Cause]:
    """Return the declared dtype, the observed dtypes that differ from it, and the likely cause.

    A module with quantized weights has no declared dtype, because the kernel chooses it.
    """
    wanted = None if seen.special else declaration.declared(name)
    wrong = [ran for ran in seen.ran if wanted is not None and not _as_declared(ran, name, seen, declaration, wanted)]
    computed, kinds = {dtype for ran in wrong for dtype in ran.dtypes}, {ran.kind for ran in wrong}
    if name in declaration.pins:
        return wanted, computed, _PIN_NOT_IN_FORCE
    if declaration.products.get(name) == "fp8":
        return wanted, computed, _NOT_FP8
    if declaration.autocast and kinds & {"norm", "statistic"}:
        # A norm operator with a half weight was given a cast weight. A pin to fp32 would not stop that.
        return "fp32", computed, _HALF_NORM if "statistic" in kinds else _HALF_NORM._replace(pin=_FOUND)
    if wanted == "tf32" or computed == {"tf32"}:
        return wanted, computed, _TF32
    return wanted, computed, _OUTSIDE_AUTOCAST if computed == {"fp32"} and declaration.autocast else _CASTS_ITSELF


def _as_declared(ran: Ran, name: str, seen: Observed, declaration: Declaration, wanted: str) -> bool:
    ran_in, pinned, product = set(ran.dtypes), name in declaration.pins, declaration.products.get(name)
    by_lists = declaration.autocast and not pinned
    if product == "fp8":  # autocast casts its bias and its input
        wanted = "fp8" if ran.kind == "product" else declaration.compute or wanted
    if ran.kind == "product":
        # The run's switch, not the pin to fp32, decides whether products use TF32.
        tf32 = {"tf32"} if wanted == "fp32" and declaration.tf32 is not False else set[str]()
        widened = seen.attends or product not in (
            None,
            "fp8",
        )  # half operands, where no kernel takes them
        return ran_in <= {wanted} | tf32 | ({"fp32", "tf32"} if widened else set())
    wanted = "fp32" if wanted == "tf32" else wanted
    if ran.kind == "lookup":
        return ran_in <= {"fp32", declaration.stored(name), None if by_lists else wanted}
    if ran.kind == "norm" and by_lists:
        # With fp32 weights or statistics and a half input the kernel sums in fp32, and autocast casts nothing.
        # The input may have the dtype of a pinned module before it.
        return ran_in <= {wanted, "fp32", *declaration.pins.values()} and ("fp32" in ran_in or not ran.weighted)
    if ran.kind == "norm":
        return ran_in <= {wanted, "fp32"}
    # a norm written out in elementwise operators, as language models' RMS norms are
    written_out = "norm" in seen.class_name.lower() and not {"product", "norm"} & {other.kind for other in seen.ran}
    if (pinned and wanted == "fp32") or (by_lists and ran.kind == "statistic" and written_out):
        return not ran_in & _HALF
    # Other operators may run in fp32, and in the dtypes of pinned modules before them.
    return not ran_in & (_HALF - {wanted, *declaration.pins.values()})


# ---------------------------------------------------------------------- likely causes and advice


_FOUND = "found"


class _Cause(NamedTuple):
    """A likely cause and its fix. ``pin``: a dtype to pin the module to instead; ``_FOUND``: the observed one."""

    reason: str
    fix: str
    pin: str | None = None


_LOST_PIN = _Cause(
    "its parameters were cast or replaced after the pin was applied (parameter.data = …, load_state_dict(assign=True))",
    "cast before trainer.fit, and do not change pinned parameters afterwards",
)
_NO_MASTERS = _Cause(
    "a half-precision checkpoint was loaded, or the module was cast by hand: there are no fp32 master weights",
    "load it in fp32 (transformers: dtype=torch.float32) or call .float() before trainer.fit",
    pin=_FOUND,
)
_CAST = _Cause(
    "the module was cast by hand after the precision plugin had converted it, or was made later",
    "remove the cast",
    pin=_FOUND,
)
_PIN_NOT_IN_FORCE = _Cause(
    "the pin is not in force: the plan was not applied yet, the module was replaced or unpinned, or it casts itself",
    "let the Trainer apply the plan or DtypePinning (or call plan.convert_module), and remove casts from its forward",
)
_NOT_FP8 = _Cause(
    "products did not run in FP8: the layer was frozen or replaced since, or its weight is used without it",
    "let the Trainer apply the plan, and use the weight through the layer; or name the layer in skip= of FP8",
)
_OUTSIDE_AUTOCAST = _Cause(
    "autocast is off where it runs: torch.autocast(enabled=False) around it, or a call outside the step's own context",
    "remove what turns autocast off",
    pin="fp32",
)
_HALF_NORM = _Cause(
    "its input and its weights were cast to half precision, in its forward or before it", "remove the cast", pin="fp32"
)
_CASTS_ITSELF = _Cause(
    "it casts its inputs or weights itself, or runs under an autocast of another dtype",
    "remove the cast from its forward",
    pin=_FOUND,
)
_TF32 = _Cause(
    "torch's TF32 switches were changed after the run began", "set them with the plan's tf32=, or with EnableTF32, only"
)
_STATE = _Cause(
    "the optimizer keeps its state in another dtype, or loaded a state saved in another",
    "use an optimizer whose state has the dtype of its parameters, or load a state saved under the same precision",
)
_REDUCED = _Cause(
    "a communication hook casts gradients, or they are summed in the dtype they are stored in",
    "remove the hook; a plan's reduce_dtype= says what gradients are summed in",
)
