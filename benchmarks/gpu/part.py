"""``python -m benchmarks.gpu.part NAME FILE [--quick]``: one part, whose figures go into the file as they come."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


class Figures(dict[str, Any]):
    """Figures by name, on disk after each one."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def note(self, name: str, value: Any) -> None:
        """Keep a figure."""
        self[name] = value
        self.write()
        print(f"{name}: {value}", flush=True)

    def write(self) -> None:
        """Put everything on disk."""
        self._path.write_text(json.dumps(self))


def main() -> int:
    """Exit status: that of the part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("file", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available() and not options.quick:
        print("This part needs a CUDA device. --quick tries it on a CPU, with figures that mean nothing.")
        return 2
    module = import_module("benchmarks.gpu.cuda_tests" if options.name == "tests" else "benchmarks.gpu.measure")
    run = getattr(module, options.name)
    return int(run(Figures(options.file), quick=options.quick) or 0)


if __name__ == "__main__":
    sys.exit(main())
