"""Predicts a Llama of 7B made on the meta device; prints bytes of parameters, seconds, and GiB this process had."""

from __future__ import annotations

import resource
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.memory import Trained
from lightning_mp import MixedPrecisionPlan
from lightning_mp.planner import predict_memory

if __name__ == "__main__":
    begin = time.monotonic()
    with torch.device("meta"):  # transformers' own sizes are those of Llama 7B
        module = Trained(LlamaForCausalLM(LlamaConfig()).train(), "AdamW")
    found = predict_memory(module, torch.zeros(1, 2048, dtype=torch.int64), MixedPrecisionPlan("bf16-mixed"))
    print(found.to_markdown())
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(found.parts["parameters"], time.monotonic() - begin, gib)
