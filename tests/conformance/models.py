"""What cells train: the Llama of the first table and the models of the second, tiny, of random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, ROWS = 128, 12, 8
WIDTH, CLASSES, PIXELS, MELS, EXPERTS = 64, 8, 8, 8, 4
_IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}

Batch = tuple[Tensor, ...]
#: a model on a batch → logits and what they should be
Answer = Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]


def llama() -> nn.Module:
    """Two layers from its config; its head is not tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": LENGTH}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    # eager attention: its matrix products can be seen one by one
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **_IDS, attn_implementation="eager", use_cache=False))


def _adapted(**options: Any) -> nn.Module:
    from peft import LoraConfig, TaskType, get_peft_model

    targets = ["q_proj", "v_proj", "down_proj"]
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type=TaskType.CAUSAL_LM, **options)
    return get_peft_model(llama(), lora)


def gpt2() -> nn.Module:
    """Its table is its head, its layers are transformers' Conv1D."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 2, "n_head": 4}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**sizes, **quiet, **_IDS))


def t5() -> nn.Module:
    """Encoder and decoder that share a table and a bias by relative position."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    ids = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
    return T5ForConditionalGeneration(T5Config(**sizes, **ids, dropout_rate=0.0, use_cache=False))


def whisper() -> nn.Module:
    """Convolutions before an encoder whose positions are frozen; the decoder's table is its head."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "num_mel_bins": MELS, "d_model": WIDTH, "use_cache": False}
    layers = {f"{part}_layers": 1 for part in ("encoder", "decoder")}
    heads = {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
    widths = {f"{part}_ffn_dim": 128 for part in ("encoder", "decoder")}
    lengths = {"max_source_positions": LENGTH, "max_target_positions": LENGTH}
    quiet = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    ids = {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}
    ids |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    return WhisperForConditionalGeneration(
        WhisperConfig(**sizes, **layers, **heads, **widths, **lengths, **quiet, **ids)
    )


class Experts(nn.Module):
    """An expert for each row; which one, the data says."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [WIDTH * (1 + number % 2) for number in range(EXPERTS)]  # experts of unequal size
        made = [nn.Sequential(nn.Linear(WIDTH, size), nn.GELU(), nn.Linear(size, WIDTH)) for size in sizes]
        self.experts = nn.ModuleList(made)

    def forward(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        parts = []
        for row, number in zip(hidden.unbind(), chosen.tolist(), strict=True):
            parts.append(self.experts[number](row))
        return hidden + torch.stack(parts).to(hidden.dtype)


class Moe(nn.Module):
    """A table, two layers of experts, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Experts(), Experts()])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        hidden = self.table(tokens)
        for depth, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            hidden = layer(norm(hidden), (chosen + depth) % EXPERTS)
        return self.head(hidden)


class Recurrent(nn.Module):
    """An LSTM whose recurrent weight is a norm times a direction."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.utils.weight_norm(nn.LSTM(WIDTH, WIDTH, batch_first=True), "weight_hh_l0")
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        # oneDNN has no LSTM in fp16 for every CPU
        with torch.backends.mkldnn.flags(enabled=False):
            return self.head(self.lstm(self.table(tokens))[0])


class Encoder(nn.Module):
    """torch's own layers of attention, the future masked."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(self.table(tokens), mask, is_causal=True))


class Residual(nn.Module):
    """Two convolutions with BatchNorm around which the input goes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)]
        norms = [nn.BatchNorm2d(channels) for _ in range(2)]
        self.body = nn.Sequential(convolutions[0], norms[0], nn.ReLU(), convolutions[1], norms[1])

    def forward(self, image: Tensor) -> Tensor:
        return (image + self.body(image)).relu()


def resnet() -> nn.Module:
    """Two residual blocks, then classes."""
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(
        *stem, Residual(16), Residual(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)
    )


# ---------------------------------------------------------------------- data


def _text(generator: torch.Generator) -> Batch:
    """Each token is 5 times the one before plus 1, but for one in ten."""
    tokens = [torch.randint(VOCABULARY, (ROWS,), generator=generator)]
    for _ in range(LENGTH - 1):
        noise = torch.randint(VOCABULARY, (ROWS,), generator=generator)
        ruled = (tokens[-1] * 5 + 1) % VOCABULARY
        tokens.append(torch.where(torch.rand(ROWS, generator=generator) < 0.1, noise, ruled))
    return (torch.stack(tokens, dim=1),)


def _routed(generator: torch.Generator) -> Batch:
    """Text, and each row's expert: in some batches a rank uses two of the four and the other rank the others."""
    row = torch.arange(ROWS)
    apart = torch.rand(1, generator=generator) < 0.5
    return *_text(generator), torch.where(apart, row // (ROWS // 2) * 2 + row % 2, row % EXPERTS)


def _images(generator: torch.Generator) -> Batch:
    """A class is a shift of all colours."""
    labels = torch.randint(CLASSES, (ROWS,), generator=generator)
    noise = torch.randn(ROWS, 3, PIXELS, PIXELS, generator=generator)
    return noise + labels.view(-1, 1, 1, 1) / CLASSES, labels


def _sounds(generator: torch.Generator) -> Batch:
    """What is heard says what comes first."""
    (tokens,) = _text(generator)
    noise = torch.randn(ROWS, MELS, 2 * LENGTH, generator=generator)
    return noise + tokens[:, :1, None] / VOCABULARY, tokens


# ---------------------------------------------------------------------- what is asked of a model


def _next_token(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return model(input_ids=batch[0]).logits[:, :-1], batch[0][:, 1:]


def _plainly(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return model(*batch)[:, :-1], batch[0][:, 1:]


def _repeated(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return model(batch[0], labels=batch[-1]).logits, batch[-1]


def _class(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return model(batch[0]), batch[1]


@dataclass(frozen=True)
class Subject:
    """A model, its data, and what it needs of a Trainer and of DDP."""

    build: Callable[[], nn.Module]
    data: Callable[[torch.Generator], Batch] = _text
    answer: Answer = _next_token
    trainer: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)

    @property
    def synced(self) -> bool:
        """Whether statistics of a batch are those of all ranks."""
        return bool(self.trainer.get("sync_batchnorm"))

    def model(self) -> nn.Module:
        """The same weights wherever it is made."""
        generator = torch.get_rng_state()
        torch.manual_seed(0)
        model = self.build().train()
        torch.set_rng_state(generator)
        return model


SUBJECTS = {
    "llama": Subject(llama),
    "gpt2": Subject(gpt2),
    "moe": Subject(Moe, _routed, _plainly, ddp={"find_unused_parameters": True}),
    "resnet": Subject(resnet, _images, _class),
    "resnet+sync": Subject(resnet, _images, _class, trainer={"sync_batchnorm": True}),
    "transformer_encoder": Subject(Encoder, answer=_plainly),
    "t5": Subject(t5, answer=_repeated),
    "lora": Subject(_adapted),
    "dora": Subject(lambda: _adapted(use_dora=True)),
    "lstm+weight_norm": Subject(Recurrent, answer=_plainly),
    "whisper": Subject(whisper, _sounds, _repeated),
}
