"""DeepSpeed ZeRO under a plan, and its JSON."""
