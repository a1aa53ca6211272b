"""Which matrix products run in FP8, and by which recipe, as data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

from lightning_mp.errors import Faults, did_you_mean
from lightning_mp.policy.expression import expression

#: torchao's recipes, by the words a plan has for them
RECIPES = ("rowwise", "tensorwise", "rowwise_gw_hp", "mxfp8", "mxfp8_gw_hp")


@dataclass(frozen=True, kw_only=True, slots=True)
class FP8:
    """The rule of the FP8 products of ``"fp8-mixed"``: which linear layers, with which scales, and when.

    Args:
        recipe: ``"rowwise"`` gives each row a scale of its own, so that no token changes another's and an inf stays in
            its row; ``"tensorwise"`` one scale a tensor; ``"rowwise_gw_hp"`` is rowwise with the weights' gradients
            in bf16. ``"mxfp8"`` gives each 32 numbers of a row a power of two as scale (OCP Microscaling Formats 1.0):
            Blackwell multiplies so, elsewhere it is emulated. ``"mxfp8_gw_hp"`` has the weights' gradients in bf16.
        modules: the layers that may be converted; a pattern as in :class:`Pin`, or several.
        skip: the layers that are left in bf16; as ``modules``.
        all_gather: FSDP2 gathers converted weights in FP8 (``"tensorwise"`` alone).
        evaluate: what validation, test and prediction run in: ``"bf16"``, or ``"fp8"`` as training.
        emulate: compute the products in fp32 from the rounded numbers, where the device has no FP8 units.
        small: ``"skip"`` leaves layers too small to pay for the recipe in bf16, ``"convert"`` converts them too.

    Raises:
        PlanError: every bad value at once.
    """

    recipe: Literal["rowwise", "tensorwise", "rowwise_gw_hp", "mxfp8", "mxfp8_gw_hp"] = "rowwise"
    modules: str | tuple[str, ...] = "*"
    skip: str | tuple[str, ...] = ("lm_head",)
    all_gather: bool = False
    evaluate: Literal["bf16", "fp8"] = "bf16"
    emulate: bool = False
    small: Literal["skip", "convert"] = "skip"

    __repr__ = expression

    def __post_init__(self) -> None:
        with Faults("FP8") as faults:
            faults.one_of("recipe", self.recipe, RECIPES, did_you_mean(str(self.recipe), RECIPES, "write 'rowwise'"))
            modules = _patterns("modules", self.modules, faults)
            if modules == ():
                faults.add("modules=(), which converts nothing", "a pattern, or several", "write modules='*'")
            object.__setattr__(self, "modules", modules[0] if len(modules) == 1 else modules)
            object.__setattr__(self, "skip", _patterns("skip", self.skip, faults))
            for name in ("all_gather", "emulate"):
                faults.one_of(name, getattr(self, name), (True, False), "write a boolean, without quotes")
            faults.one_of("evaluate", self.evaluate, ("bf16", "fp8"), "write 'bf16', the default")
            faults.one_of("small", self.small, ("skip", "convert"), "write 'convert' to convert small layers too")
            if self.all_gather is True and self.recipe in RECIPES and self.recipe != "tensorwise":
                faults.add(
                    f"all_gather=True with recipe={self.recipe!r}, whose scales belong to rows of the whole weight",
                    "all_gather=True with recipe='tensorwise'",
                    "leave all_gather out, or write recipe='tensorwise'",
                )

    @property
    def blocks(self) -> bool:
        """Whether blocks of 32 numbers have a scale each."""
        return self.recipe.startswith("mxfp8")

    @property
    def anywhere(self) -> bool:
        """Whether it runs on a device without FP8 units too, emulated: MXFP8 does so of its own accord."""
        return self.emulate or self.blocks

    @property
    def multiple(self) -> int:
        """What a dimension of a product is a multiple of: 16 (``torch._scaled_mm`` on CUDA), or a block."""
        return 32 if self.blocks else 16

    @property
    def patterns(self) -> tuple[str, ...]:
        """``modules`` as a tuple."""
        return (self.modules,) if isinstance(self.modules, str) else self.modules


def _patterns(name: str, value: object, faults: Faults) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    found: list[Any] = list(cast("Iterable[Any]", given)) if isinstance(given, Iterable) else [None]
    if isinstance(given, dict) or not all(isinstance(pattern, str) and pattern for pattern in found):
        faults.add(f"{name}={value!r}", "a non-empty fnmatch pattern, or several", f"write {name}=('lm_head',)")
    return tuple(found)
