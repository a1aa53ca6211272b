"""``python -m benchmarks.casts``: what autocast's casts of weights take of a forward and backward pass, on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

TOKENS, RUNS = (4, 128), 25


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(n_embd=384, n_layer=4, n_head=6, vocab_size=4096, n_positions=256, **quiet))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Print the share: medians of runs in turn."""
    torch.manual_seed(0)
    model, ids = _gpt2(), torch.randint(4096, TOKENS)
    weights = [parameter for name, parameter in model.named_parameters() if ".h." in name and parameter.dim() == 2]

    def passes() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            model(input_ids=ids, labels=ids).loss.backward()

    def casts() -> None:
        for weight in weights:
            weight.detach().to(torch.bfloat16)

    for warm in (passes, casts):
        warm()
    both = [(_seconds(passes), _seconds(casts)) for _ in range(RUNS)]
    whole, cast = (statistics.median(seconds) for seconds in zip(*both, strict=True))
    print(f"{sum(weight.numel() for weight in weights):,} weights, {TOKENS[0] * TOKENS[1]} tokens: {cast / whole:.1%}")


if __name__ == "__main__":
    main()
