"""FullyShardedDataParallel under a plan."""
