"""What this package uses of torch, Lightning and DeepSpeed beyond their public names, each once, and why."""
