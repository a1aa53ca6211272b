"""Layers that a rank leaves out of a forward (LayerDrop): under FSDP2 two processes end as under DDP."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from support.comparing import of_training, same_runs
from support.models import FEATURES, HIDDEN, same_weights
from support.ranks import Ranks
from support.sharded import HOSTS, OPTIMIZERS, RATE, Ranked, ddp, rank, trained

pytestmark = pytest.mark.gloo
MODES = ("32-true", "bf16-mixed", "16-mixed")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Dropping(nn.Module):
    """Four layers, of which some are left out: ``dropped(pass, layer)`` says which, by the number of the pass."""

    def __init__(self, dropped: Callable[[int, int], bool]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.dropped, self.passes = dropped, 0

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            if not (self.training and self.dropped(self.passes, place)):
                x = layer(x)
        self.passes += 1
        return x


def by_rank(number: int, place: int) -> bool:
    """Every layer is left out once on rank 1, and a half of them on rank 0."""
    return (number % 4 == place) if rank() else (number % 8 == 2 * place)


def two_at_once(number: int, place: int) -> bool:
    return place in ((0, 1), (1, 2), (2, 3), (0, 3))[number % 4] if rank() else False


def on_no_rank(number: int, place: int) -> bool:
    """A layer that no rank uses has no gradient; every second step."""
    return number % 2 == 1 and place == 1


class Drops(Ranked):
    """``frozen``: the layers' input has no gradient. ``twice``: they run twice. ``looped``: in the module's forward."""

    def __init__(
        self, dropped: Any = by_rank, *, frozen: bool = False, twice: bool = False, looped: bool = False
    ) -> None:
        super().__init__(optimizer="adamw")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            stack = Dropping(dropped)
            self.net = nn.Sequential(nn.Linear(FEATURES, HIDDEN), stack, nn.Linear(HIDDEN, 1))
        self.net[0].requires_grad_(not frozen)
        self.twice, self.looped = twice, looped
        self.validated: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.looped:
            return self.net(x)
        stack = cast("Any", self.net[1])
        x = self.net[0](x)
        for place, layer in enumerate(stack.layers):
            if not (self.training and stack.dropped(len(self.losses), place)):
                x = layer(x)
        return self.net[2](x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch[0] * self.factor(), batch[1]
        out = self(x).float()
        if self.twice:
            out = out + self(-x).float()
        return (out - y).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS["adamw"]([parameter for parameter in self.parameters() if parameter.requires_grad])


class Speech(LightningModule):
    """A transformers speech model with the LayerDrop that it trains with by default, drawn by each rank itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = SPEECH[kind]()
        self.losses: list[float] = []
        self.whisper = kind == "whisper"

    def on_train_start(self) -> None:
        torch.manual_seed(11 + self.global_rank)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        inputs = {"input_features": features.view(-1, 8, 16), "labels": labels} if self.whisper else {}
        loss = self.model(**(inputs or {"input_values": features.flatten(1), "labels": labels[:, 0] % 4})).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS["adamw"](self.parameters())


def _encoder(name: str) -> Any:
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
        "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_labels": 4,
        "classifier_proj_size": 8, "mask_time_prob": 0.0,
    }  # fmt: skip
    dropouts = {f"{part}_dropout": 0.0 for part in ("hidden", "attention", "activation", "feat_proj")}
    config = getattr(transformers, f"{name}Config")(**sizes, **dropouts, layerdrop=0.3)
    return getattr(transformers, f"{name}ForSequenceClassification")(config)


def _whisper() -> Any:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=32, num_mel_bins=8, encoder_layers=4, decoder_layers=4, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, d_model=16, max_source_positions=8,
        max_target_positions=16, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, encoder_layerdrop=0.25, decoder_layerdrop=0.25,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


SPEECH: dict[str, Callable[[], Any]] = {
    "wav2vec2": partial(_encoder, "Wav2Vec2"), "hubert": partial(_encoder, "Hubert"), "whisper": _whisper,
}  # fmt: skip


def sounds() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(16, 128, generator=generator)
    labels = torch.randint(3, 32, (16, 8), generator=generator)
    return DataLoader(torch.utils.data.TensorDataset(features, labels), batch_size=2)


@dataclass(frozen=True)
class Compared:
    mode: str
    module: Callable[[], LightningModule]
    wrap: Any = "Block"
    speech: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def run(self) -> dict[str, Any]:
        options: dict[str, Any] = {"data": sounds()} if self.speech else {}
        options |= dict(self.options)
        hosts = {"ddp": ddp(find_unused_parameters=True), "sharded": HOSTS["fsdp2"](wrap=self.wrap)}
        return {name: trained(self.mode, host, self.module(), **options) for name, host in hosts.items()}


def _equal(ranks: Ranks, case: Compared) -> None:
    results = ranks.run(case)
    for result in results:
        assert same_runs(result["ddp"], result["sharded"], of_training(case.mode, RATE)), result
    assert same_weights(*(result["sharded"]["weights"] for result in results))


@pytest.mark.parametrize("mode", MODES)
def test_layers_that_one_rank_leaves_out_are_trained_as_under_ddp(ranks: Ranks, mode: str) -> None:
    for dropped in (by_rank, two_at_once, on_no_rank):
        _equal(ranks, Compared(mode, partial(Drops, dropped)))
    _equal(ranks, Compared(mode, partial(Drops, frozen=True)))
    _equal(ranks, Compared(mode, partial(Drops, twice=True)))
    _equal(ranks, Compared(mode, partial(Drops, looped=True)))
    _equal(ranks, Compared(mode, Drops, options=(("accumulate_grad_batches", 2), ("checkpointing", "Block"))))


@pytest.mark.parametrize("kind", SPEECH)
def test_speech_models_drop_layers_by_rank_as_under_ddp(ranks: Ranks, kind: str) -> None:
    mode = MODES[list(SPEECH).index(kind)]
    _equal(ranks, Compared(mode, partial(Speech, kind), wrap=None, speech=True))
