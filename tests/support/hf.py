"""transformers' Llama and GPT-2 from small configs, with peft's LoRA on their attention."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

VOCABULARY, WIDTH, LENGTH = 32, 16, 6


def llama(lora: bool = False, tied: bool = False, **config: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 24, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2 if tied else 1}
    settings = {**sizes, **heads, "tie_word_embeddings": tied, **config}
    return _with_lora(LlamaForCausalLM(LlamaConfig(**settings)), ["q_proj", "v_proj"], lora)


def gpt2(lora: bool = False, dropout: float = 0.0, **config: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    settings = {**sizes, **rates, "bos_token_id": 0, "eos_token_id": 0, **config}
    return _with_lora(GPT2LMHeadModel(GPT2Config(**settings)), ["c_attn"], lora)


def t5() -> nn.Module:
    """A two-layer T5, which keeps ``wo`` in fp32 where it is fp16."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)).train()


def ernie() -> nn.Module:
    """A two-layer mixture of experts, which keeps its routers in fp32 in either half format."""
    from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 24, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8, "moe_layer_start_index": 0}
    return Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**sizes, **heads, **experts)).train()


#: by the name that a test gives it
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama, "tied llama": partial(llama, tied=True), "gpt2": gpt2, "t5": t5, "ernie": ernie,
}  # fmt: skip


def _with_lora(model: nn.Module, targets: list[str], lora: bool) -> nn.Module:
    if not lora:
        return model.train()
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():  # peft reads a property that transformers renamed
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        options = {"r": 2, "target_modules": targets, "init_lora_weights": False}
        return get_peft_model(model, LoraConfig(**options, fan_in_fan_out="c_attn" in targets)).train()


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(3))


def token_batches(rows: int = 16) -> DataLoader[Tensor]:
    return DataLoader(cast("Any", tokens(rows)), batch_size=2)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss
