"""When a rank fails, the others end too."""

from __future__ import annotations

import atexit
import subprocess
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_mp.compat.lightning import Strategy, SubprocessScriptLauncher

#: seconds that ranks have to end by themselves, and to say why, once the one that started them has failed
PATIENCE = 10.0

_Base = Strategy if TYPE_CHECKING else object


class FailTogether(_Base):
    """Ends the processes that Lightning's own launcher started when the one that started them fails.

    Lightning watches in one direction only: rank 0 is ended when one of its children fails. The other way round they
    would stay: on NCCL in a collective, until its timeout of half an hour.
    """

    def on_exception(self, exception: BaseException) -> None:
        """As the host does; the children are waited for at exit, when this rank's own message has been printed."""
        launcher: Any = self.launcher
        if isinstance(launcher, SubprocessScriptLauncher) and launcher.procs:
            atexit.register(_end, launcher.procs)
        super().on_exception(exception)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in processes:
        process.kill()  # SIGTERM does not reach a process inside a collective; nothing happens to one that ended
        process.wait()
