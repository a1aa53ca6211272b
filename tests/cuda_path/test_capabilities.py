"""On every device each mode trains, or is refused in the plan's words before step one; never by torch."""

from dataclasses import replace
from typing import get_args, get_type_hints

import pytest

from cuda_path.fits import Fit, Fits
from cuda_path.machine import Machine, Processes
from lightning_mp import FP8
from support.cells import WHOLE

MODES = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
MACHINES = {
    "7.0": Machine((7, 0), name="Tesla V100-SXM2-16GB"),
    "7.5": Machine((7, 5), name="Tesla T4"),
    "8.0": Machine((8, 0), name="NVIDIA A100-SXM4-80GB"),
    "8.6": Machine((8, 6), name="NVIDIA GeForce RTX 3090"),
    "8.9": Machine((8, 9), name="NVIDIA L4"),
    "9.0": Machine((9, 0)),
    "10.0": Machine((10, 0), name="NVIDIA B200"),
    "12.0": Machine((12, 0), name="NVIDIA GeForce RTX 5090"),
    "gfx90a": Machine((9, 0), name="AMD Instinct MI250X", arch="gfx90a:sramecc+:xnack-"),
    "gfx942": Machine((9, 4), name="AMD Instinct MI300X", arch="gfx942:sramecc+:xnack-"),
    "gfx1100": Machine((11, 0), name="AMD Radeon RX 7900 XTX", arch="gfx1100"),
}
RECIPES = get_args(get_type_hints(FP8)["recipe"])
#: products in FP8 need compute capability 8.9; on ROCm their format is another one, and they are refused
WITH_FP8 = ("8.9", "9.0", "10.0", "12.0")
SHORT = Fit(steps=1)


def _ways() -> dict[str, Fit]:
    plain = {mode: replace(SHORT, precision=mode) for mode in MODES}
    fp8 = replace(SHORT, precision="fp8-mixed")
    recipes = {
        f"{recipe}{' emulated' * emulate}": replace(
            fp8, plan={"fp8": FP8(recipe=recipe, small="convert", emulate=emulate)}
        )
        for recipe in RECIPES
        for emulate in (False, True)
    }
    return {**plain, "tf32": replace(SHORT, plan={"tf32": True}), "auto": replace(SHORT, precision="auto"), **recipes}


#: on both sides of what bf16, FP8 and its blocks need, and ROCm
OFTEN = ("7.5", "8.9", "10.0", "gfx942")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in OFTEN else WHOLE) for name in MACHINES])
def test_a_mode_trains_or_is_refused_by_the_plan(name: str, cuda: Processes) -> None:
    ways = _ways()
    found = dict(zip(ways, cuda.run(Fits(tuple(ways.values())), MACHINES[name]), strict=True))
    refused = {way for way, said in found.items() if isinstance(said, str)}
    kernels = {way for way in ways if way.startswith(RECIPES) and not way.endswith("emulated")}
    blocks = {way for way in kernels if way.startswith("mxfp8")}  # emulated where there are none
    if MACHINES[name].arch:
        assert refused == {way for way in ways if way.startswith(RECIPES)}, found
    else:
        assert refused == (set() if name in WITH_FP8 else kernels - blocks), found
