"""Pipeline parallelism on ``torch.distributed.pipelining``: stages of layers over ranks, and the schedule they run."""
