"""Every answer of how-to/does-it-work-with.md is one that was run: here, or by the test that is named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from lightning_mp import MixedPrecisionPlan, PlanError
from lightning_mp.cli import app
from support.docs import ROOT, tables
from support.models import Regression
from support.running import fit

PAGE = "docs/how-to/does-it-work-with.md"
#: a row → the test of it: a name of this file, or a file and a name in it
RUN = {
    "torch.compile": "tests/conformance/test_compiled_gloo.py::test_a_compiled_run_is_the_eager_run",
    "FlashAttention, SDPA": "test_attention_runs_in_the_modes_dtype_and_in_fp32_under_a_pin",
    "LoRA, QLoRA": "tests/plan/test_every_mode.py::quantized",
    "EMA, weight averaging": "tests/plan/test_schedulers.py::ema",
    "SWA": "tests/strategies/test_features_gloo.py::swa",
    "a GAN, two optimizers": "tests/support/features.py::two_optimizers_of_a_gan",
    "Muon": "tests/conformance/optimizers.py::muon",
    "SAM, LBFGS": "tests/plan/test_closures.py::SAM",
    "optimizers replaced or wrapped in the run": "tests/plan/test_manual_gloo.py::refused_under_zero",
    "an optimizer in backward, or beside Lightning's": "tests/plan/test_optimizers_elsewhere.py::InBackward",
    "Polyak's step, AliG, wrappers (Lookahead, schedule-free)": "tests/plan/test_closures.py::Lookahead",
    "a gradient penalty": "test_a_gradient_penalty_trains_and_is_computed_under_autocast_inside_a_pin",
    "sync batch norm": "tests/strategies/test_batch_norm_gloo.py",
    "gradient accumulation, clipping": "tests/plan/test_clipping.py",
    "a resume on another number of devices": "tests/checkpoints/test_sharded_gloo.py",
    "export to safetensors, `from_pretrained`": "test_weights_are_exported_to_from_pretrained",
    "a newer torch, Lightning, DeepSpeed": "tests/compat/test_releases.py::has_every_private_name_runs",
    "Hugging Face `Trainer`, Accelerate": "test_other_trainers_take_no_plan",
    "Lightning Fabric": "test_other_trainers_take_no_plan",
    "Apple MPS, AMD ROCm, TPU": "",
}


def test_every_row_names_what_ran_it() -> None:
    (table,) = tables(PAGE)
    assert [row[0] for row in table[1:]] == list(RUN)
    for row, test in RUN.items():
        file, _, name = test.partition("::")
        if "/" in file:
            assert (ROOT / file).exists(), row
            assert name in (ROOT / file).read_text(encoding="utf-8"), row
        else:
            assert test == "" or test in globals(), row


class Attends(Regression):
    def __init__(self, penalty: bool = False) -> None:
        super().__init__()
        self.attention, self.penalty = Attention(), penalty

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        given = torch.ones(2, 4, 8, requires_grad=True)
        out = self.attention(given)
        if not self.penalty:
            return out.float().square().mean() + super().training_step(batch, batch_idx)
        (gradient,) = torch.autograd.grad(out.float().sum(), given, create_graph=True)
        return gradient.square().mean() + super().training_step(batch, batch_idx)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 24)
        self.backward: list[torch.dtype] = []

    def forward(self, given: Tensor) -> Tensor:
        query, key, value = self.into(given).chunk(3, -1)
        found = nn.functional.scaled_dot_product_attention(query, key, value)
        self.seen = found.dtype
        found.register_hook(lambda gradient: self.backward.append((gradient @ gradient.mT).dtype))
        return found


@pytest.mark.parametrize(
    ("mode", "pins", "dtype"),
    [
        ("bf16-mixed", {}, torch.bfloat16),
        ("16-mixed", {}, torch.float16),
        ("bf16-mixed", {"attention": "fp32"}, torch.float32),
    ],
)
def test_attention_runs_in_the_modes_dtype_and_in_fp32_under_a_pin(mode: str, pins: Any, dtype: torch.dtype) -> None:
    module = Attends()
    fit(module, plugins=[MixedPrecisionPlan(mode, pins=pins)], max_steps=1)
    assert module.attention.seen == dtype


def test_a_gradient_penalty_trains_and_is_computed_under_autocast_inside_a_pin() -> None:
    module = Attends(penalty=True)
    before = module.attention.into.weight.detach().clone()
    fit(module, plugins=[MixedPrecisionPlan("bf16-mixed", pins={"attention": "fp32"})], max_steps=1)
    assert not torch.equal(before, module.attention.into.weight)
    assert module.attention.backward == [torch.bfloat16]


def test_weights_are_exported_to_from_pretrained(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1)

    class Wraps(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT2LMHeadModel(config)

    module = Wraps()
    runner = fit(module, plugins=[MixedPrecisionPlan("bf16-mixed")], max_steps=1)
    runner.save_checkpoint(tmp_path / "last.ckpt")
    (tmp_path / "weights").mkdir()
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path / "weights")
    command = ["consolidate", str(tmp_path / "last.ckpt"), str(tmp_path / "weights" / "model.safetensors")]
    assert CliRunner().invoke(app, [*command, "--prefix", "model."]).exit_code == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "weights").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in module.model.state_dict().items())


def test_other_trainers_take_no_plan() -> None:
    from transformers import Trainer

    plan: Any = MixedPrecisionPlan("bf16-mixed")
    with pytest.raises(TypeError, match="plugins"):
        Trainer(nn.Linear(2, 1), plugins=[plan])  # pyright: ignore[reportCallIssue]
    fabric, net = Fabric(plugins=[plan], accelerator="cpu"), nn.Linear(2, 1)
    model, _ = fabric.setup(net, torch.optim.SGD(net.parameters()))
    with pytest.raises(PlanError, match="Use a Trainer"):
        fabric.backward(model(torch.ones(1, 2)).sum())
