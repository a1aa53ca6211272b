"""FSDP2, HSDP and tensor parallelism under a plan."""
