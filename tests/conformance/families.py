"""Families of models that people train: transformers' configurations, torch's own layers, and other architectures.

Each is tiny, from its configuration, with random weights. What trains it is one list of losses: one loss is automatic
optimization, several are manual optimization with an optimizer each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, LENGTH, ROWS, WIDTH, PIXELS, CLASSES = 96, 10, 2, 32, 32, 4
#: a model and a rank's batch → a loss
Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Family:
    """A model, a batch of it, its losses, and the modules that activation checkpointing recomputes."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    #: the submodule whose parameters an optimizer takes → its loss
    losses: dict[str, Loss]
    blocks: str
    #: what Trainer and DDP need to be told
    ddp: dict[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        """The same weights wherever it is made, no dropout, training."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.build()
        for module in model.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, float) and ("drop" in name or name == "p"):
                    setattr(module, name, 0.0)
        return model.train()


def _ids(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, length), generator=generator)


def _text(generator: torch.Generator) -> dict[str, Tensor]:
    ids, mask = _ids(generator), torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _whole_text(generator: torch.Generator) -> dict[str, Tensor]:
    ids = _ids(generator)
    return {"input_ids": ids, "labels": ids}


def _boxes(generator: torch.Generator) -> dict[str, Tensor]:
    return {**_text(generator), "bbox": torch.randint(0, 32, (ROWS, LENGTH, 4), generator=generator).sort(-1).values}


def _image(generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, PIXELS, PIXELS, generator=generator)}


def _labelled(generator: torch.Generator) -> dict[str, Tensor]:
    return {**_image(generator), "labels": torch.randint(CLASSES, (ROWS,), generator=generator)}


def _pairs(generator: torch.Generator) -> dict[str, Tensor]:
    return {**_image(generator), "input_ids": _ids(generator), "return_loss": True}


def _map(generator: torch.Generator) -> dict[str, Tensor]:
    return {**_image(generator), "labels": torch.randint(CLASSES, (ROWS, PIXELS, PIXELS), generator=generator)}


def _sound(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_values": torch.randn(ROWS, 800, generator=generator), "labels": _ids(generator, 2)}


def _spectrum(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_features": torch.randn(ROWS, 8, 2 * LENGTH, generator=generator), "labels": _ids(generator)}


def _series(generator: torch.Generator) -> dict[str, Tensor]:
    past, future = (torch.randn(ROWS, n, 2, generator=generator) for n in (16, 4))
    return {"past_values": past, "future_values": future}


def _objects(generator: torch.Generator) -> dict[str, Any]:
    boxes = torch.rand(ROWS, 4, generator=generator) / 2 + 0.1
    return {**_image(generator), "labels": [{"class_labels": torch.tensor([1]), "boxes": b[None]} for b in boxes]}


def _features(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return (torch.randn(4, LENGTH, WIDTH, generator=generator), torch.randn(4, LENGTH, WIDTH, generator=generator))


def _pixels(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(CLASSES, (4,), generator=generator)


def _graph(generator: torch.Generator) -> dict[str, Tensor]:
    edges = torch.randint(8, (2, 20), generator=generator)
    return {"x": torch.randn(8, WIDTH, generator=generator), "edges": edges, "y": torch.randn(8, generator=generator)}


def _own(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(**batch).loss


def _regress(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch[0]).float(), batch[1].float())


def _classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]).float(), batch[1])


_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_UNUSED = {"find_unused_parameters": True}
_GROUPED = {"num_key_value_heads": 2}
_SERIAL = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 48, "n_ctx": 48}
_VIT = {"image_size": PIXELS, "patch_size": 8, "num_labels": CLASSES}
_DISTILLED = {"vocab_size": VOCABULARY, "dim": WIDTH, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": CLASSES}
_RESIDUAL = {"embedding_size": 8, "layer_type": "basic"}
_STATES = {"state_size": 8, "time_step_rank": 4, "use_mambapy": False}
_SPEECH = {
    "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False, "layerdrop": 0.0,
    "ctc_loss_reduction": "mean", "ctc_zero_infinity": True,
}  # fmt: skip
_ENCODER_DECODER = {
    "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}  # fmt: skip


def _hf(
    config: str,
    model: str,
    blocks: str,
    batch: Callable[[torch.Generator], Any] = _text,
    loss: Loss = _own,
    ddp: dict[str, Any] | None = None,
    sizes: dict[str, Any] | None = None,
    **options: Any,
) -> Family:
    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**{**(sizes or {**_SIZES, "use_cache": False}), **options})
        made._attn_implementation = "eager"
        return getattr(transformers, model)(made)

    return Family(build, batch, {"": loss}, blocks, ddp or {})


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {**_SIZES, "projection_dim": 16}
    return CLIPModel(CLIPConfig(text_config=text, vision_config={**text, **_VIT}, projection_dim=16))


def _siglip() -> nn.Module:
    from transformers import SiglipConfig, SiglipModel

    return SiglipModel(SiglipConfig(text_config={**_SIZES, "projection_size": WIDTH}, vision_config={**_SIZES, **_VIT}))


def _detr() -> nn.Module:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(**_STAGES, **_RESIDUAL, out_features=["stage2"])
    sizes = {**_ENCODER_DECODER, "num_queries": 4, "num_labels": CLASSES, "auxiliary_loss": False}
    return DetrForObjectDetection(
        DetrConfig(
            use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, **sizes
        )
    )


TEXT = {
    "llama": _hf("LlamaConfig", "LlamaForCausalLM", "LlamaDecoderLayer", **_GROUPED),
    "mistral": _hf("MistralConfig", "MistralForCausalLM", "MistralDecoderLayer", **_GROUPED, sliding_window=4),
    "qwen2": _hf("Qwen2Config", "Qwen2ForCausalLM", "Qwen2DecoderLayer", **_GROUPED, tie_word_embeddings=True),
    "qwen3": _hf("Qwen3Config", "Qwen3ForCausalLM", "Qwen3DecoderLayer", **_GROUPED, head_dim=8),
    "gemma": _hf("GemmaConfig", "GemmaForCausalLM", "GemmaDecoderLayer", **_GROUPED, head_dim=8),
    "gemma2": _hf("Gemma2Config", "Gemma2ForCausalLM", "Gemma2DecoderLayer", **_GROUPED, head_dim=8),
    "gemma3": _hf("Gemma3TextConfig", "Gemma3ForCausalLM", "Gemma3DecoderLayer", **_GROUPED, head_dim=8),
    "phi": _hf("PhiConfig", "PhiForCausalLM", "PhiDecoderLayer"),
    "phi3": _hf("Phi3Config", "Phi3ForCausalLM", "Phi3DecoderLayer", **_GROUPED),
    "gpt2": _hf("GPT2Config", "GPT2LMHeadModel", "GPT2Block", **_SERIAL),
    "gpt_neo": _hf("GPTNeoConfig", "GPTNeoForCausalLM", "GPTNeoBlock", num_layers=2, attention_types=[[["global"], 2]]),
    "gpt_neox": _hf("GPTNeoXConfig", "GPTNeoXForCausalLM", "GPTNeoXLayer"),
    "gptj": _hf("GPTJConfig", "GPTJForCausalLM", "GPTJBlock", **_SERIAL, rotary_dim=4),
    "opt": _hf("OPTConfig", "OPTForCausalLM", "OPTDecoderLayer", ffn_dim=64, word_embed_proj_dim=WIDTH, layerdrop=0.0),
    "bloom": _hf("BloomConfig", "BloomForCausalLM", "BloomBlock", n_layer=2, n_head=4),
    "falcon": _hf("FalconConfig", "FalconForCausalLM", "FalconDecoderLayer"),
    "stablelm": _hf("StableLmConfig", "StableLmForCausalLM", "StableLmDecoderLayer", **_GROUPED),
    "olmo2": _hf("Olmo2Config", "Olmo2ForCausalLM", "Olmo2DecoderLayer"),
    "starcoder2": _hf("Starcoder2Config", "Starcoder2ForCausalLM", "Starcoder2DecoderLayer", **_GROUPED),
    "cohere": _hf("CohereConfig", "CohereForCausalLM", "CohereDecoderLayer"),
    "granite": _hf("GraniteConfig", "GraniteForCausalLM", "GraniteDecoderLayer", **_GROUPED),
    "mixtral": _hf("MixtralConfig", "MixtralForCausalLM", "MixtralDecoderLayer", **_GROUPED, num_local_experts=2),
    "qwen2_moe": _hf(
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM", "Qwen2MoeDecoderLayer", **_GROUPED,
        num_experts=2, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=32,
    ),
    "mamba": _hf("MambaConfig", "MambaForCausalLM", "MambaBlock", _whole_text, **_STATES),
    "mamba2": _hf(
        "Mamba2Config", "Mamba2ForCausalLM", "Mamba2Block", _whole_text,
        num_heads=8, head_dim=8, n_groups=1, state_size=8, chunk_size=4,
    ),
    "falcon_mamba": _hf("FalconMambaConfig", "FalconMambaForCausalLM", "FalconMambaBlock", _whole_text, **_STATES),
    "bert": _hf("BertConfig", "BertForMaskedLM", "BertLayer"),
    "roberta": _hf("RobertaConfig", "RobertaForMaskedLM", "RobertaLayer"),
    "albert": _hf("AlbertConfig", "AlbertForMaskedLM", "AlbertLayer", embedding_size=16),
    "distilbert": _hf("DistilBertConfig", "DistilBertForMaskedLM", "TransformerBlock", sizes=_DISTILLED),
    "electra": _hf("ElectraConfig", "ElectraForMaskedLM", "ElectraLayer", embedding_size=16),
    "deberta_v2": _hf(
        "DebertaV2Config", "DebertaV2ForMaskedLM", "DebertaV2Layer", ddp=_UNUSED,
        relative_attention=True, pos_att_type=["p2c", "c2p"],
    ),
    "modernbert": _hf(
        "ModernBertConfig", "ModernBertForMaskedLM", "ModernBertEncoderLayer", reference_compile=False,
        cls_token_id=1, sep_token_id=2,
    ),
    "layoutlm": _hf("LayoutLMConfig", "LayoutLMForMaskedLM", "LayoutLMLayer", _boxes, ddp=_UNUSED),
    "t5": _hf(
        "T5Config", "T5ForConditionalGeneration", "T5Block", _text,
        d_model=WIDTH, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0,
    ),
    "bart": _hf("BartConfig", "BartForConditionalGeneration", "BartEncoderLayer", **_ENCODER_DECODER),
    "pegasus": _hf("PegasusConfig", "PegasusForConditionalGeneration", "PegasusEncoderLayer", **_ENCODER_DECODER),
    "whisper": _hf(
        "WhisperConfig", "WhisperForConditionalGeneration", "WhisperEncoderLayer", _spectrum, num_mel_bins=8,
        max_source_positions=LENGTH, max_target_positions=LENGTH, **_ENCODER_DECODER,
    ),
}  # fmt: skip
SIGHT_AND_SOUND = {
    "vit": _hf("ViTConfig", "ViTForImageClassification", "ViTLayer", _labelled, **_VIT),
    "deit": _hf("DeiTConfig", "DeiTForImageClassification", "DeiTLayer", _labelled, **_VIT),
    "beit": _hf("BeitConfig", "BeitForImageClassification", "BeitLayer", _labelled, **_VIT),
    "dinov2": _hf("Dinov2Config", "Dinov2ForImageClassification", "Dinov2Layer", _labelled, ddp=_UNUSED, **_VIT),
    "clip": Family(_clip, _pairs, {"": _own}, "CLIPEncoderLayer"),
    "siglip": Family(_siglip, _pairs, {"": _own}, "SiglipEncoderLayer", _UNUSED),
    "swin": _hf(
        "SwinConfig", "SwinForImageClassification", "SwinLayer", _labelled,
        sizes={"image_size": PIXELS, "patch_size": 4}, embed_dim=16,
        depths=[1, 1], num_heads=[2, 4], window_size=4, num_labels=CLASSES,
    ),
    "convnext": _hf("ConvNextConfig", "ConvNextForImageClassification", "ConvNextLayer", _labelled, **_STAGES),
    "resnet": _hf(
        "ResNetConfig", "ResNetForImageClassification", "ResNetBasicLayer", _labelled, **_STAGES, **_RESIDUAL
    ),
    "segformer": _hf(
        "SegformerConfig", "SegformerForSemanticSegmentation", "SegformerLayer", _map, num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2],
        mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=CLASSES,
    ),
    "detr": Family(_detr, _objects, {"": _own}, "DetrEncoderLayer", _UNUSED),
    "wav2vec2": _hf("Wav2Vec2Config", "Wav2Vec2ForCTC", "Wav2Vec2EncoderLayer", _sound, ddp=_UNUSED, **_SPEECH),
    "hubert": _hf("HubertConfig", "HubertForCTC", "HubertEncoderLayer", _sound, ddp=_UNUSED, **_SPEECH),
    "patchtst": _hf(
        "PatchTSTConfig", "PatchTSTForPrediction", "PatchTSTEncoderLayer", _series, num_input_channels=2,
        context_length=16,
        patch_length=4, patch_stride=4, prediction_length=4, d_model=WIDTH, ffn_dim=64, norm_type="layernorm",
    ),
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, forward: Callable[[Net, Any], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.parts = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, batch: Any) -> Tensor:
        return self.parts(self, batch)


class Block(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.layers(hidden)


def _mlp(times: int = 1) -> nn.Module:
    block = Block(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *[block] * times, nn.Linear(WIDTH, WIDTH))


def _looped() -> nn.Module:
    """Its blocks are iterated over, and the list of them is never called."""

    def forward(self: Any, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    blocks = nn.ModuleList([Block(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2)])
    return Net(forward, blocks=blocks, head=nn.Linear(WIDTH, WIDTH))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _decoder() -> nn.Module:
    layer = nn.TransformerDecoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    return Net(lambda self, hidden: self.decoder(hidden, hidden.flip(1)), decoder=nn.TransformerDecoder(layer, 2))


def _attention() -> nn.Module:
    """Its mask holds the smallest number of its input's dtype."""

    def forward(self: Any, hidden: Tensor) -> Tensor:
        mask = torch.full((LENGTH, LENGTH), torch.finfo(hidden.dtype).min, dtype=hidden.dtype).triu(1)
        return self.block(hidden + self.attention(hidden, hidden, hidden, attn_mask=mask)[0])

    return Net(forward, attention=nn.MultiheadAttention(WIDTH, 4, batch_first=True), block=Block(nn.RMSNorm(WIDTH)))


def _recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):  # oneDNN has no LSTM in fp16 for every CPU
            return self.head(self.rnn(hidden)[0])

    return Net(
        forward, rnn=kind(WIDTH, WIDTH, batch_first=True), head=Block(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    )


def _cnn(norm: Callable[[int], nn.Module]) -> nn.Module:
    block = Block(nn.Conv2d(8, 8, 3, padding=1, bias=False), norm(8), nn.ReLU())
    stem = [nn.Conv2d(3, 8, 3, padding=1, bias=False), norm(8), nn.ReLU(), block]
    return nn.Sequential(*stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


def _unet() -> nn.Module:
    def forward(self: Any, image: Tensor) -> Tensor:
        down = self.down(image)
        up = functional.interpolate(self.block(functional.avg_pool2d(down, 2)), scale_factor=2)
        return self.head(torch.cat([down, up], 1)).mean((2, 3))

    block = Block(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1))
    return Net(forward, down=nn.Conv2d(3, 8, 3, padding=1), block=block, head=nn.Conv2d(16, CLASSES, 1))


def _experts() -> nn.Module:
    """Each token goes to one of three experts, weighted by a router's softmax."""

    def forward(self: Any, hidden: Tensor) -> Tensor:
        weights, chosen = self.router(self.norm(hidden)).float().softmax(-1).max(-1)
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            out = out + expert(hidden) * (weights * (chosen == number))[..., None].to(hidden.dtype)
        return hidden + out

    experts = nn.ModuleList([Block(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)])
    return Net(forward, norm=nn.LayerNorm(WIDTH), router=nn.Linear(WIDTH, 3), experts=experts)


def _messages() -> nn.Module:
    def forward(self: Any, batch: dict[str, Tensor]) -> Tensor:
        hidden, (source, target) = self.embed(batch["x"]), batch["edges"]
        for layer in (self.first, self.second):
            sent = layer(hidden[source])
            hidden = hidden + torch.zeros_like(hidden).index_add(0, target, sent.to(hidden.dtype))
        return self.head(hidden).squeeze(-1)

    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU()) for _ in range(2)]
    return Net(
        forward, embed=Block(nn.Linear(WIDTH, WIDTH)), first=layers[0], second=layers[1], head=nn.Linear(WIDTH, 1)
    )


def _detector() -> nn.Module:
    block = Block(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), block, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self: Any, image: Tensor) -> Tensor:
        features = self.backbone(image)
        return torch.cat([self.classes(features), self.boxes(features).sigmoid()], -1)

    return Net(forward, backbone=backbone, classes=nn.Linear(8, CLASSES), boxes=nn.Linear(8, 4))


def _detected(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    out, loss = model(batch["pixel_values"]).float(), torch.zeros(())
    for row, target in zip(out, batch["labels"], strict=True):
        loss = loss + functional.cross_entropy(row[None, :CLASSES], target["class_labels"])
        loss = loss + functional.l1_loss(row[CLASSES:].expand_as(target["boxes"]), target["boxes"].float())
    return loss


def _gan() -> nn.Module:
    generator = nn.Sequential(nn.Linear(WIDTH, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, WIDTH))
    critic = nn.Sequential(Block(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2)), nn.Linear(WIDTH, 1))
    return Net(lambda self, noise: self.generator(noise), generator=generator, critic=critic)


def _critic_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    real, fake = model.critic(batch[1]).float(), model.critic(model(batch[0]).detach()).float()
    return functional.softplus(-real).mean() + functional.softplus(fake).mean()


def _generator_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.softplus(-model.critic(model(batch[0])).float()).mean()


class Float8Linear(nn.Module):
    """A frozen float8 weight beside its scale, as transformers' FP8Linear holds it."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
        scale = weight.abs().amax() / 448
        self.weight = nn.Parameter((weight / scale).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("weight_scale_inv", scale)

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight.to(hidden.dtype) * self.weight_scale_inv.to(hidden.dtype))


def _quantized() -> nn.Module:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        return self.norm(self.base(hidden) + self.lora_b(self.lora_a(hidden)))

    adapters = {"lora_a": nn.Linear(WIDTH, 4, bias=False), "lora_b": nn.Linear(4, WIDTH, bias=False)}
    return Net(forward, base=Float8Linear(), norm=nn.LayerNorm(WIDTH), **adapters)


def _lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "down_proj"]
    return get_peft_model(TEXT["llama"].build(), LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))


def _normed_weights() -> nn.Module:
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(parametrized, Block(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)))


def _conv1d() -> nn.Module:
    layers = [nn.Conv1d(LENGTH, LENGTH, 3, padding=1), nn.InstanceNorm1d(LENGTH, affine=True), nn.ReLU()]
    return Block(*layers, nn.ConvTranspose1d(LENGTH, LENGTH, 3, padding=1))


def _plain(
    build: Callable[[], nn.Module], blocks: str = "Block", batch: Any = _features, loss: Loss = _regress, **ddp: Any
) -> Family:
    return Family(build, batch, {"": loss}, blocks, ddp)


OTHERS = {
    "mlp": _plain(_mlp),
    "block run twice": _plain(lambda: _mlp(2)),
    "iterated blocks": _plain(_looped),
    "transformer encoder": _plain(_encoder, "TransformerEncoderLayer"),
    "transformer decoder": _plain(_decoder, "TransformerDecoderLayer"),
    "attention, masked": _plain(_attention),
    "lstm": _plain(lambda: _recurrent(nn.LSTM)),
    "gru": _plain(lambda: _recurrent(nn.GRU)),
    "batchnorm cnn": _plain(lambda: _cnn(nn.BatchNorm2d), batch=_pixels, loss=_classify),
    "groupnorm cnn": _plain(lambda: _cnn(lambda width: nn.GroupNorm(2, width)), batch=_pixels, loss=_classify),
    "unet": _plain(_unet, batch=_pixels, loss=_classify),
    "conv1d": _plain(_conv1d),
    "experts": _plain(_experts),
    "graph": _plain(
        _messages, batch=_graph, loss=lambda model, batch: (model(batch) - batch["y"]).float().pow(2).mean()
    ),
    "detection": _plain(_detector, batch=_objects, loss=_detected),
    "gan": Family(_gan, _features, {"critic": _critic_loss, "generator": _generator_loss}, "Block", _UNUSED),
    "fp8 weights + lora": _plain(_quantized, "Float8Linear"),
    "llama + lora": _plain(_lora, "LlamaDecoderLayer", _text, _own),
    "weight norm": _plain(_normed_weights),
}
FAMILIES: dict[str, Family] = {**TEXT, **SIGHT_AND_SOUND, **OTHERS}
