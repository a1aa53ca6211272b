"""The model that the doctor examines, and the few cheap checks that every fit makes."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_mp.compat.lightning import LightningModule, check_copy, rank_zero_warn
from lightning_mp.compat.torch import has_forward_hooks, reentrant
from lightning_mp.compat.transformers import checkpointing_function
from lightning_mp.errors import Fault, Faults, PlanError, counted
from lightning_mp.modules import pins
from lightning_mp.modules.patterns import original_class
from lightning_mp.numerics.dtypes import describe, dtype_name, to_torch
from lightning_mp.plan import for_strategy
from lightning_mp.policy import PrecisionPolicy, hardware
from lightning_mp.policy.pieces import LossScaling
from lightning_mp.policy.precision_policy import DTYPES_OF, STOCK_PRECISIONS, precision_fix, precision_word
from lightning_mp.record.findings import Finding

HALF = ("bf16", "fp16")
Check = Callable[["ModelUnderTest"], Iterable[Finding]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ModelUnderTest:
    """A model, and the precision, device, strategy and Trainer arguments of its training.

    ``policy`` is ``None`` under Lightning's own plugins. ``storage`` is the dtype that unpinned
    parameters are cast to, or ``None`` if they keep their dtypes. The properties list the model's
    modules and parameters, and ``stored`` returns the dtype of a parameter in training.
    """

    model: nn.Module
    precision: str
    storage: str | None
    compute: str
    policy: PrecisionPolicy | None = None
    scaling: LossScaling | None = None
    device: hardware.Device
    strategy: Any = None
    trainer: Mapping[str, Any]
    optimizer: Any = None

    @cached_property
    def modules(self) -> tuple[tuple[str, nn.Module], ...]:
        """Every module once, with its first name. The model's own name is empty."""
        return tuple(self.model.named_modules())

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Every floating-point parameter once, by its first name."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.is_floating_point()}

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The ``parameters`` that require gradients."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @cached_property
    def pinned(self) -> dict[int, str]:
        """The dtype of each pinned module and its parameters, by ``id``.

        Tensors that the model itself keeps in fp32 are in it too. It is empty without a plan.
        """
        if self.policy is None:
            return {}
        pin_map = pins.resolve(
            self.model, self.policy.pins, Faults(), self.policy.storage_dtype, self.policy.buffer_dtype
        )
        return {id(member.module): member.pin.dtype for member in pin_map.members} | pin_map.dtypes()

    @cached_property
    def _kept(self) -> dict[int, torch.dtype]:
        """The tensors that a plan does not cast, by ``id``: quantized weights, their scales, float64 parameters."""
        return {} if self.policy is None else pins.kept_dtypes(self.model, to_torch(self.policy.storage_dtype))

    def stored(self, parameter: Tensor) -> str:
        """Return the dtype in which ``parameter`` is stored during training, such as ``"fp32"``."""
        storage = None if id(parameter) in self._kept else self.storage
        return self.pinned.get(id(parameter)) or storage or dtype_name(parameter.dtype)


def case_of(
    model: nn.Module,
    plan: Any,
    strategy: Any,
    trainer: Mapping[str, Any],
    target: hardware.Device | None = None,
    **given: Any,
) -> ModelUnderTest:
    """Return the model under test for the arguments of :func:`lightning_mp.doctor`.

    Raises:
        PlanError: ``model`` is no module or belongs to the other copy of Lightning, or ``plan`` is
            no plan.
    """
    if not isinstance(model, nn.Module):
        raise PlanError.of(f"model={model!r} is not a torch.nn.Module", "pass the module itself", "doctor")
    check_copy(model, "doctor")
    target = target or device_of(trainer)
    strategy = trainer.get("strategy") if strategy is None else strategy
    given |= {"model": model, "device": target, "strategy": strategy, "trainer": trainer}
    plan = _plan_in(trainer) if plan is None else plan
    policy = PrecisionPolicy.from_dict(cast("Mapping[str, Any]", plan)) if isinstance(plan, Mapping) else plan
    policy = getattr(policy, "policy", policy)
    if not isinstance(policy, PrecisionPolicy):
        return _stock(plan, given)
    if policy.precision == "auto":
        policy = for_strategy.resolved(policy, target, model)
    dtypes = {"storage": policy.storage_dtype, "compute": policy.compute_dtype}
    return ModelUnderTest(precision=policy.precision, policy=policy, scaling=policy.loss_scaling, **dtypes, **given)


def _plan_in(trainer: Mapping[str, Any]) -> Any:
    """Return the plan, plugin or precision in Trainer arguments; else ``"32-true"``, Lightning's default."""
    plugins = trainer.get("plugins") or ()
    for plugin in cast("Iterable[Any]", plugins if isinstance(plugins, (list, tuple)) else (plugins,)):
        if hasattr(plugin, "policy") or isinstance(getattr(plugin, "precision", None), str):
            return plugin
    return trainer.get("precision") or "32-true"


def _stock(plan: Any, given: dict[str, Any]) -> ModelUnderTest:
    """Return the model under test for one of Lightning's own plugins, or its precision.

    Raises:
        PlanError: ``plan`` is neither.
    """
    word = str(getattr(plan, "precision", plan))
    precision = precision_word(word) or word
    if precision not in STOCK_PRECISIONS:
        fix = precision_fix(word, (), STOCK_PRECISIONS)
        allowed = f"a MixedPrecisionPlan, a mapping of its fields, {', '.join(STOCK_PRECISIONS)}"
        raise PlanError([Fault(f"plan={plan!r}", allowed=allowed, fix=fix)], "doctor")
    storage, compute = DTYPES_OF[precision]
    scaler = getattr(plan, "scaler", None)
    scaling = LossScaling.torch(**({} if scaler is None else {"init_scale": scaler.get_scale()}))
    return ModelUnderTest(
        precision=precision,
        # Lightning casts only to half and double precision
        storage=None if storage == "fp32" else storage,
        compute=compute,
        scaling=scaling if precision == "16-mixed" else None,
        **given,
    )


def device_of(trainer: Mapping[str, Any]) -> hardware.Device:
    """Return the facts of the device that Lightning would choose for these arguments.

    If they ask for a GPU and this machine has none, return a CUDA device of unknown facts.
    """
    accelerator = str(trainer.get("accelerator") or "auto").lower()
    for kind, backend in (("cuda", torch.cuda), ("mps", torch.backends.mps)):
        if accelerator in ("auto", "gpu", kind) and backend.is_available():
            return describe(torch.device(kind))
    if accelerator in ("gpu", "cuda"):
        return hardware.Device("cuda", "a GPU that is not in this machine")
    return describe(torch.device("cpu"))


def listed(names: Iterable[str]) -> str:
    """Return the first four of ``names`` as text, and the number of the others."""
    every = [name or "the model itself" for name in names]
    return ", ".join([*every[:4], *([f"{len(every) - 4} more"] if len(every) > 4 else [])])


def below(name: str, above: str) -> bool:
    """True if the module ``name`` is ``above`` or lies in it."""
    return not above or name == above or name.startswith(f"{above}.")


def eval_mode(case: ModelUnderTest) -> Iterator[Finding]:
    """Yield a warning about modules in eval mode that have trainable weights.

    ``Trainer.fit`` does not switch them to training mode since Lightning 2.2. A norm in eval mode
    is left out, because its statistics may be frozen on purpose.
    """
    tops: list[str] = []
    for name, module in case.modules:
        if module.training or any(below(name, top) for top in tops):
            continue
        # a frozen part belongs in eval mode, and a norm may keep its statistics there
        alone = bool(name) and "norm" in type(module).__name__.lower() and next(module.children(), None) is None
        if not alone and any(parameter.requires_grad for parameter in module.parameters()):
            tops.append(name)
    if tops:
        root = "self" if isinstance(case.model, LightningModule) else "model"
        which = ".".join(filter(None, (root, tops[0]))) if len(tops) == 1 else "each"
        off = "dropout, batch statistics and transformers' gradient checkpointing are off there"
        why = f"{off}; from_pretrained() returns models in eval mode, and Trainer.fit does not change it"
        fix = f"call {which}.train() where the model is made, or before fit"
        what = f"in eval mode with trainable weights: {listed(tops)}"
        yield Finding("eval_mode", "warning", what, why, fix, tops[0] or None)


class Block(NamedTuple):
    """A module that recomputes its activations.

    If it is ``reentrant`` and no input requires a gradient, its parameters get no gradients.
    """

    name: str
    module: nn.Module
    reentrant: bool


def no_input_gradients(case: ModelUnderTest) -> Iterator[Finding]:
    """Yield an error if reentrant checkpointing cuts off gradients, as with LoRA.

    The blocks' inputs require no gradients there, so nothing in the blocks is trained.
    Non-reentrant checkpointing, the plan's own included, is right.

    Nothing is found if a forward hook may turn on gradients, or if a trained parameter may be used
    before the blocks. In a transformers model, modules defined after the last block run after it.
    """
    blocks = [block for block in _blocks(case) if block.reentrant]
    within = {id(module) for block in blocks for module in block.module.modules()}
    owners = {name: id(case.model.get_submodule(name.rpartition(".")[0])) for name in case.trained}
    others = {name: owner for name, owner in owners.items() if owner not in within}
    if len(owners) == len(others):
        return
    homes = (name for name, module in case.modules if hasattr(type(module), "get_input_embeddings"))
    home = next((name for name in homes if all(below(block.name, name) for block in blocks)), None)
    last = max(place for place, (_, module) in enumerate(case.modules) if id(module) in within)
    behind = {id(module) for name, module in case.modules[last + 1 :] if home is not None and below(name, home)}
    inner = within - {id(block.module) for block in blocks}
    hooked = any(has_forward_hooks(module) for _, module in case.modules if id(module) not in inner)
    if hooked or not behind.issuperset(others.values()):
        return
    kind = original_class(blocks[0].module).__name__
    what = f"reentrant checkpointing of {counted(len(blocks), 'block')} whose inputs require no gradient"
    rest = f"only {next(iter(others))} and what is behind do" if others else "nothing is left to train, backward raises"
    instead = f"checkpointing={kind!r}" if case.policy is not None else f"ActivationCheckpointing({kind!r})"
    yield Finding(
        "lora_checkpoint_no_input_grads",
        "error",
        f"{what}: {listed([block.name for block in blocks])}",
        f"{counted(len(owners) - len(others), 'trained weight')} in there get no gradient; {rest}",
        "call model.enable_input_require_grads(), or checkpoint with gradient_checkpointing_kwargs="
        f"{{'use_reentrant': False}}, or call model.gradient_checkpointing_disable() and use {instead}",
        blocks[0].name,
    )


def use_cache(case: ModelUnderTest) -> Iterator[Finding]:
    """Yield a finding for each transformers model that keeps a key-value cache while it recomputes.

    An error with reentrant torch wrappers, whose gradients are wrong. A warning with other blocks,
    and an info under the plan's own checkpointing, which turns the cache off.
    """
    blocks = list(_blocks(case))
    by_plan = case.policy is not None and case.policy.checkpointing is not None
    for name, module in case.modules:
        model = cast("Any", module)
        if not hasattr(type(module), "can_generate") or not model.can_generate():
            continue
        mine = [block for block in blocks if below(block.name, name)]
        if getattr(model.config, "use_cache", False) is True and (mine or by_plan):
            wrong = any(reentrant(block.module) for block in mine)
            severity = "error" if wrong else "warning" if mine else "info"  # the plan turns it off itself
            what = "config.use_cache is on while activations are recomputed"
            kept = "keys and values of every layer are kept, much of the memory that checkpointing should save"
            why = f"{kept}; a recomputation by torch's reentrant wrapper attends to them, and gradients are wrong"
            fix = "set model.config.use_cache = False for training, and on again to generate"
            yield Finding("use_cache_while_checkpointing", severity, what, why, fix, name or None)


def _blocks(case: ModelUnderTest) -> Iterator[Block]:
    """Yield the blocks that are checkpointed now.

    They are torch's checkpoint wrappers, and the innermost transformers modules with
    ``gradient_checkpointing`` on. For a flagged model its layers are yielded.
    """
    on = [each for each in case.modules if getattr(each[1], "gradient_checkpointing", False) is True]
    flagged = {name for name, module in on if module.training and checkpointing_function(module) is not None}
    for name, module in case.modules:
        wrapped = reentrant(module)
        if wrapped is not None:
            yield Block(name, module, wrapped)
        elif name in flagged and not any(other != name and below(other, name) for other in flagged):
            keywords = getattr(checkpointing_function(module), "keywords", {})
            # the flag of a model is for its layers
            lists = [(key, child) for key, child in module.named_children() if isinstance(child, nn.ModuleList)]
            layers = [(f"{key}.{at}", layer) for key, each in lists for at, layer in each.named_children()]
            for at, block in layers or [("", module)]:
                full = ".".join(filter(None, (name, at)))
                yield Block(full, block, keywords.get("use_reentrant") is not False)


#: checks that cost one walk over the modules
CHEAP = (eval_mode, no_input_gradients, use_cache)


def made(check: Check, case: ModelUnderTest) -> list[Finding]:
    """Return the findings of ``check``. If it raises an exception, log it and return an empty list."""
    try:
        return list(check(case))
    except Exception as error:  # any model may come; the other checks still help
        _log.info("the check %s could not be made: %s: %s", check.__name__, type(error).__name__, error)
        return []


def warn_at_fit(module: nn.Module, policy: PrecisionPolicy) -> None:
    """Warn once, on rank 0, of the cheap checks' warnings and errors.

    No forward runs and no optimizer is made.

    Raises:
        PlanError: ``module`` is no module, or belongs to the other copy of Lightning.
    """
    case = case_of(module, policy, None, {"accelerator": "cpu"})
    findings = [finding for check in CHEAP for finding in made(check, case) if finding.severity != "info"]
    if findings:
        lines = [f"  {finding.code} {finding.name}: {finding.what}. Fix: {finding.fix}" for finding in findings]
        hint = "lightning_mp.doctor(model, plan) and 'lightning-mp doctor CONFIG' say more."
        rank_zero_warn("\n".join(["before the first step:", *lines, hint]))
