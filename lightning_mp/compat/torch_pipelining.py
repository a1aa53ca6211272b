"""torch's private names around pipelining, each behind a class or function that says what it is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage


class WatchedStage(PipelineStage):
    """A stage that says when torch only wants to see shapes: it then runs module and loss on unset numbers."""

    #: called with True before that, and with False after
    shapes_only: Callable[[bool], None]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return self._quietly(super()._prepare_forward_infra, args, kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return self._quietly(super()._prepare_backward_infra, args, kwargs)

    def _quietly(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before = [(buffer, buffer.detach().clone()) for buffer in self.submod.buffers()]
        self.shapes_only(True)
        drawn_from = [self.device] if self.device.type == "cuda" else []
        try:  # what is unset may be nan, and what is dropped of it would be missing from the batch
            with torch.autograd.set_detect_anomaly(False), torch.random.fork_rng(drawn_from):
                return run(*args, **kwargs)
        finally:
            self.shapes_only(False)
            for buffer, value in before:  # a batch norm has seen what is no data
                buffer.data.copy_(value)
