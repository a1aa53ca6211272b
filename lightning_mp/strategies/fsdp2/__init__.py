"""FSDP2 (fully_shard), HSDP and tensor parallel under a plan."""
