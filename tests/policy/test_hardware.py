"""Which device can run which mode, and what ``auto`` means on each."""

import pytest

from lightning_mp.policy import PRECISIONS
from lightning_mp.policy.hardware import Device, choose, peak, refusal

GIB = 2**30


def gpu(name: str, capability: tuple[int, int], bf16: str = "native", gib: int = 80) -> Device:
    return Device("cuda", name, capability, bf16, gib * GIB)  # type: ignore[arg-type]


DEVICES = {
    "K80": gpu("K80", (3, 7), "none", 12), "GTX 980": gpu("GTX 980", (5, 2), "none", 4),
    "P100": gpu("P100", (6, 0), "emulated", 16), "V100": gpu("V100", (7, 0), "emulated", 32),
    "T4": gpu("T4", (7, 5), "emulated", 16), "A100": gpu("A100", (8, 0)), "H100": gpu("H100", (9, 0)),
    "H200": gpu("H200", (9, 0), gib=141), "B200": gpu("B200", (10, 0), gib=192),
    "MI250X": Device("cuda", "AMD Instinct MI250X", (9, 0), rocm=True),
    "RX 7900": Device("cuda", "AMD Radeon RX 7900 XTX", (11, 0), rocm=True),
    "MI300X": Device("cuda", "AMD Instinct MI300X", (9, 4), rocm=True), "new Mac": Device("mps", "Apple GPU"),
    "old Mac": Device("mps", "Apple GPU", bf16="none"), "CPU": Device("cpu", "CPU"),
    "old CPU": Device("cpu", "CPU", bf16="emulated"), "TPU": Device("xla", "TPU"),
    "meta": Device("meta", "meta", bf16="none"),
}  # fmt: skip
MODES = [mode for mode in PRECISIONS if mode != "auto"]
BF16, FP16, FP8 = {"bf16-mixed", "bf16-true"}, {"16-mixed", "16-true"}, {"fp8-mixed"}
REFUSED = {
    "K80": BF16 | FP16 | FP8,
    "GTX 980": BF16 | FP16 | FP8,
    "old Mac": BF16 | FP8,
    "TPU": set(MODES),
    "meta": set(MODES),
    **dict.fromkeys(("P100", "V100", "T4", "A100", "MI250X", "RX 7900", "MI300X", "new Mac"), FP8),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", DEVICES)
def test_a_device_refuses_what_it_cannot_do_and_nothing_else(name: str, mode: str) -> None:
    found = refusal(DEVICES[name], mode)
    assert (found is not None) == (mode in REFUSED.get(name, set()))
    if found is not None:
        given, allowed, fix = found
        assert mode in given
        assert DEVICES[name].name in given
        assert allowed
        assert fix


def test_fp8_can_be_emulated_where_there_are_no_units_for_it() -> None:
    assert refusal(DEVICES["A100"], "fp8-mixed", emulate=True) is None
    assert refusal(DEVICES["K80"], "fp8-mixed", emulate=True) is not None
    assert refusal(DEVICES["MI300X"], "fp8-mixed", emulate=True) is not None
    assert refusal(gpu("L4", (8, 9)), "fp8-mixed") is None


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name in REFUSED for mode in sorted(REFUSED[name])])
def test_what_a_refusal_proposes_is_not_refused(name: str, mode: str) -> None:
    _, _, fix = refusal(DEVICES[name], mode)  # type: ignore[misc]
    proposed = [other for other in MODES if f"'{other}'" in fix]
    assert [other for other in proposed if refusal(DEVICES[name], other)] == []
    assert proposed or "accelerator" in fix


SMALL, MEDIUM, LARGE = 50_000_000, 400_000_000, 7_000_000_000


@pytest.mark.parametrize(
    ("name", "parameters", "precision", "tf32"),
    [
        # A100/H100/H200/B200: bf16; small models without memory pressure stay in fp32, in TF32 where there is one.
        *[(name, LARGE, "bf16-mixed", "high") for name in ("A100", "H100", "H200", "B200")],
        *[(name, SMALL, "32-true", "high") for name in ("A100", "H100", "H200", "B200")],
        # V100/T4, whose bf16 is emulated: fp16 with scaling.
        *[(name, LARGE, "16-mixed", None) for name in ("V100", "T4", "P100")],
        *[(name, SMALL, "32-true", None) for name in ("V100", "T4", "P100")],
        # AMD's: bf16, no TF32
        *[(name, LARGE, "bf16-mixed", None) for name in ("MI250X", "RX 7900", "MI300X")],
        ("CPU", SMALL, "32-true", None),
        ("CPU", LARGE, "bf16-mixed", None),
        ("old CPU", LARGE, "32-true", None),
        ("new Mac", LARGE, "bf16-mixed", None),
        ("old Mac", LARGE, "16-mixed", None),
        ("K80", SMALL, "32-true", None),
        ("K80", LARGE, "32-true", None),
        ("GTX 980", MEDIUM, "32-true", None),
    ],
)
def test_auto(name: str, parameters: int, precision: str, tf32: str | None) -> None:
    choice = choose(DEVICES[name], parameters)
    assert (choice.precision, choice.tf32) == (precision, tf32)
    assert refusal(DEVICES[name], choice.precision) is None, "never what the device cannot do"
    assert DEVICES[name].name in choice.reason


@pytest.mark.parametrize(
    ("parameters", "gib", "precision"),
    [
        (99_999_999, 80, "32-true"),
        (100_000_000, 80, "bf16-mixed"),
        (50_000_000, 2, "32-true"),  # 16 bytes a parameter, 0.75 GiB: within half of the memory
        (80_000_000, 2, "bf16-mixed"),  # 1.2 GiB: beyond it
    ],
)
def test_a_small_model_is_below_100m_and_half_of_the_memory(parameters: int, gib: int, precision: str) -> None:
    assert choose(gpu("A100", (8, 0), gib=gib), parameters).precision == precision


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        (DEVICES["CPU"], "fp32"), (DEVICES["new Mac"], "fp16"),
        (gpu("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0)), "bf16"),
        (gpu("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9)), "bf16"), (gpu("NVIDIA A100-SXM4-80GB", (8, 0)), "fp8"),
        (gpu("Tesla T4", (7, 5)), "bf16"), (gpu("Tesla T4", (7, 5)), "tf32"),
        (gpu("NVIDIA of tomorrow", (99, 0)), "bf16"),
    ],
)  # fmt: skip
def test_a_peak_that_no_data_sheet_gives_is_not_guessed(device: Device, dtype: str) -> None:
    assert peak(device, dtype) is None
