"""A run without its memory: the real Trainer, plan and strategy under ``FakeTensorMode``, its storages counted."""
