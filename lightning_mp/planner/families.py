"""The model types of transformers whose parameters the planner counts, and how their layers differ from Llama's.

A model type is counted only if it is in :data:`FAMILIES` or :data:`MIXTURES`.
tests/planner/test_families.py builds every causal language model of transformers in two small
sizes, and compares the size of its matrices with the count by :data:`FAMILIES`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """How the matrices of a dense model type differ from Llama's.

    Vectors are not described: biases and norms are less than 0.3 % of a model of width 768 or more.
    """

    #: True if an MLP has a third matrix, the gate
    gated: bool = True
    #: True if positions have a table of embeddings
    positions: bool = False
    #: rows of that table beyond the longest sequence
    extra_positions: int = 0
    #: True if the model has the head and the token types of a masked language model
    masked_head: bool = False


_LLAMA = Family()
_UNGATED = Family(gated=False)
_GPT2 = Family(gated=False, positions=True)
_OPT = Family(gated=False, positions=True, extra_positions=2)
_BERT = Family(gated=False, positions=True, masked_head=True)

#: dense decoders, and BERT's encoders, by model type
FAMILIES = {
    **dict.fromkeys(
        (
            "bitnet",
            "cohere",
            "cohere2",
            "cwm",
            "diffllama",
            "ernie4_5",
            "exaone4",
            "gemma",
            "gemma2",
            "gemma3_text",
            "glm",
            "glm4",
            "granite",
            "granite_swa",
            "hunyuan_v1_dense",
            "hyperclovax",
            "internlm3",
            "iquestcoder",
            "llama",
            "ministral",
            "ministral3",
            "mistral",
            "olmo",
            "olmo2",
            "olmo3",
            "phi3",
            "qwen2",
            "qwen3",
            "seed_oss",
            "smollm3",
            "stablelm",
            "vaultgemma",
        ),
        _LLAMA,
    ),
    **dict.fromkeys(
        (
            "apertus",
            "arcee",
            "bloom",
            "codegen",
            "falcon",
            "gpt_neox",
            "gpt_neox_japanese",
            "gptj",
            "jais2",
            "mpt",
            "nanochat",
            "nemotron",
            "persimmon",
            "phi",
            "starcoder2",
        ),
        _UNGATED,
    ),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "openai-gpt"), _GPT2),
    **dict.fromkeys(("biogpt", "opt"), _OPT),
    **dict.fromkeys(
        (
            "bert",
            "camembert",
            "data2vec-text",
            "ernie",
            "megatron-bert",
            "roberta",
            "roberta-prelayernorm",
            "xlm-roberta",
            "xlm-roberta-xl",
        ),
        _BERT,
    ),
}

#: mixtures of experts, as implemented in transformers 5
MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
