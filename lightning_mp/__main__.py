"""``python -m lightning_mp``: the ``lightning-mp`` command."""

from lightning_mp.cli import main

main()
