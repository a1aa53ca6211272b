"""DeepSpeed ZeRO under a plan."""
