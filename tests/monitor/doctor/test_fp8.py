"""What the doctor says of FP8 before a run."""

from __future__ import annotations

from torch import nn

from lightning_mp import FP8, MixedPrecisionPlan
from lightning_mp.policy.hardware import Device
from support import hf
from support.doctor import A100, found

H100 = Device("cuda", "NVIDIA H100", (9, 0))
WIDE = (4096, 4096)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(*WIDE, device="meta"))


def fp8(**fields: object) -> MixedPrecisionPlan:
    return MixedPrecisionPlan("fp8-mixed", fp8=FP8(**fields))  # type: ignore[arg-type]


def test_a_model_with_nothing_to_convert_is_an_error_with_the_table() -> None:
    finding = found(hf.gpt2(), fp8(small="convert"))["fp8_converts_nothing"]
    assert finding.severity == "error"
    assert "c_attn (16, 48): kind" in finding.what
    assert "fp8_converts_nothing" not in found(nn.Sequential(nn.Linear(32, 32)), fp8(small="convert"))


def test_fp8_that_is_not_compiled_is_named_on_cuda_alone() -> None:
    compiled = net()
    compiled[0].compile(backend="eager")  # type: ignore[operator]
    assert found(net(), fp8(), device=H100)["fp8_not_compiled"].severity == "warning"
    assert found(net(), fp8()) == found(compiled, fp8(), device=H100) == {}
    assert found(net(), "bf16-mixed", device=H100) == {}


def test_tensorwise_is_named_on_a_causal_model_alone() -> None:
    tensorwise = found(hf.llama(), fp8(recipe="tensorwise", small="convert"))
    assert tensorwise["fp8_tensorwise_not_causal"].severity == "info"
    evaluated = found(hf.llama(), fp8(recipe="tensorwise", small="convert", evaluate="fp8"))
    assert evaluated["fp8_tensorwise_not_causal"].severity == "warning"
    assert "fp8_tensorwise_not_causal" not in found(hf.llama(), fp8(small="convert"))
    assert found(net(), fp8(recipe="tensorwise")) == {}


def test_dimensions_are_to_be_multiples_of_16() -> None:
    model = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 32), nn.Linear(32, 32))
    assert "not multiples of 16" in found(model, fp8(small="convert"))["dims_not_aligned"].what
    assert found(model, "bf16-mixed") == {}


def test_fp8_on_a_gpu_that_the_run_refuses_is_an_error() -> None:
    finding = found(net(), fp8(), device=A100)["precision_refused"]
    assert finding.severity == "error"
    assert "capability 8.9" in finding.why
    assert "'bf16-mixed'" in finding.fix
    for plan, device in ((fp8(emulate=True), A100), (fp8(), H100), ("bf16-mixed", A100)):
        assert "precision_refused" not in found(net(), plan, device=device)
    assert "precision_refused" not in found(net(), fp8(), None, {"accelerator": "gpu"}, device=None)  # one not here
