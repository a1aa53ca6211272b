"""Callbacks for stock plugins that change a run and undo the change: TF32, pins and checkpointing."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch

from lightning_mp.compat.lightning import LightningModule, Trainer, check_copy
from lightning_mp.compat.torch import backward_traced_outside_autocast
from lightning_mp.errors import Faults, PlanError
from lightning_mp.modules import checkpointing
from lightning_mp.modules import pins as pinning
from lightning_mp.modules.patterns import call_with_original_classes
from lightning_mp.numerics.dtypes import TORCH_DTYPES, cast_, describe
from lightning_mp.plan import for_strategy
from lightning_mp.plan.plan import MixedPrecisionPlan
from lightning_mp.plan.skip_aware import Override
from lightning_mp.policy import Checkpointing, PrecisionPolicy
from lightning_mp.policy.precision_policy import DTYPES_OF, PinsLike
from lightning_mp.record.run_log import RunCallback


class ActingCallback(RunCallback):
    """Applies something in ``setup`` and undoes it in ``teardown``, or in ``on_exception`` if the run failed."""

    #: the field of MixedPrecisionPlan that does the same
    plan_field: str
    _of_run = ("_undo",)

    def __init__(self) -> None:
        self._undo: Callable[[], object] | None = None

    def apply(self, trainer: Trainer, pl_module: LightningModule, faults: Faults) -> Callable[[], object] | None:
        """Check and apply. Return a function that undoes it, or ``None`` if nothing was changed."""
        raise TypeError(f"{type(self).__name__} must define apply()")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse to run next to a plan, then apply.

        Raises:
            PlanError: a MixedPrecisionPlan is present, or the arguments do not fit the model.
        """
        name = type(self).__name__
        check_copy(trainer, name)
        if isinstance(trainer.precision_plugin, MixedPrecisionPlan):
            fix = f"remove {name} and set MixedPrecisionPlan({self.plan_field}=...)"
            raise PlanError.of(f"{name} next to {trainer.precision_plugin!r}", fix, name)
        self._release(trainer)
        undo = self.apply(trainer, pl_module, Faults(name))
        if undo is not None:
            run = partial(call_with_original_classes, pl_module)
            override = Override(pl_module, "configure_optimizers", run)
            self._undo = lambda: (undo(), override.remove())

    def _release(self, trainer: Trainer, error: BaseException | None = None) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()


class EnableTF32(ActingCallback):
    """Lets fp32 matrix products and convolutions run in TF32 during the run, and restores the setting afterwards.

    Args:
        setting: ``"high"``, ``"medium"``, or ``"highest"`` for IEEE fp32. On a device without TF32 it changes nothing
            and says so.

    Raises:
        PlanError: an unknown setting, torch's newer ``fp32_precision`` switches were set before, or a
            MixedPrecisionPlan next to it (use its ``tf32=``).
    """

    plan_field = "tf32"

    def __init__(self, setting: str = "high") -> None:
        super().__init__()
        self._policy = PrecisionPolicy(precision="32-true", tf32=setting)

    def apply(self, trainer: Trainer, pl_module: LightningModule, faults: Faults) -> Callable[[], object] | None:
        """Set TF32 if the device has it."""
        device = describe(trainer.strategy.root_device)
        for_strategy.check_device(self._policy, device, faults)
        faults.raise_if_any()
        return for_strategy.switch_tf32(self._policy, device)


class DtypePinning(ActingCallback):
    """Stores and runs chosen modules in a dtype of their own, whatever the stock plugin does to the rest.

    ``pins`` is a mapping as for :class:`~lightning_mp.MixedPrecisionPlan`, such as ``{"*norm*": "fp32"}``. After the
    run every module has its own forward and its earlier dtypes again. A cast back to a narrower dtype rounds.

    Raises:
        PlanError: a pattern that matches nothing, contradicting pins on tied weights, or a MixedPrecisionPlan next
            to it (use its ``pins=``).
    """

    plan_field = "pins"

    def __init__(self, pins: PinsLike) -> None:
        super().__init__()
        self.pins = PrecisionPolicy(precision="32-true", pins=pins).pins  # pyright: ignore[reportArgumentType]

    def apply(self, trainer: Trainer, pl_module: LightningModule, faults: Faults) -> Callable[[], object] | None:
        """Pin the matching modules."""
        pin_map = pinning.resolve(pl_module, self.pins, faults)
        undo, precision = ExitStack(), str(trainer.precision)
        if precision == "16-mixed" and any(member.pin.dtype == "fp16" for member in pin_map.members):
            fix = "pin to 'bf16', or use MixedPrecisionPlan('16-mixed', pins=...), whose scaler does"
            faults.add("a pin to fp16 under stock '16-mixed', whose GradScaler unscales no fp16 gradients", fix=fix)
        faults.raise_if_any()
        for member in pin_map.members:
            for tensor in (*member.module.parameters(recurse=False), *member.module.buffers(recurse=False)):
                undo.callback(cast_, [tensor], tensor.dtype)
        compute = TORCH_DTYPES.get(DTYPES_OF.get(precision, DTYPES_OF["32-true"])[1], torch.float32)
        device_type = trainer.strategy.root_device.type
        pinning.apply(pin_map, mixed=precision.endswith("-mixed"), compute_dtype=compute, device_type=device_type)
        undo.callback(pinning.remove, [member.module for member in pin_map.covered])
        undo.enter_context(backward_traced_outside_autocast())
        return undo.close


class ActivationCheckpointing(ActingCallback):
    """Recomputes the activations of the chosen modules in the backward pass, with any strategy that keeps the module.

    :class:`~lightning_mp.policy.Checkpointing` explains the arguments. Modules that ``configure_model`` makes do not
    exist yet when callbacks are set up, and cannot be matched.

    Raises:
        PlanError: a pattern that matches nothing, or a MixedPrecisionPlan next to it (use its ``checkpointing=``).
    """

    plan_field = "checkpointing"

    def __init__(
        self,
        modules: Any,
        *,
        mode: Literal["full", "selective"] = "full",
        every: int = 1,
        save_ops: Iterable[str] | None = None,
        preserve_rng: bool = True,
    ) -> None:
        super().__init__()
        ops = None if save_ops is None else tuple(save_ops)
        self.config = Checkpointing(modules=modules, mode=mode, every=every, save_ops=ops, preserve_rng=preserve_rng)

    def apply(self, trainer: Trainer, pl_module: LightningModule, faults: Faults) -> Callable[[], object] | None:
        """Checkpoint the activations of the matching modules."""
        chosen = checkpointing.select(pl_module, self.config, faults)
        faults.raise_if_any()
        return checkpointing.apply(pl_module, chosen, self.config).close
