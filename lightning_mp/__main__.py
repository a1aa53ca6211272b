"""``python -m lightning_mp``: the ``lightning-mp`` command."""

from lightning_mp.cli.app import main

main()
