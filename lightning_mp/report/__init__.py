"""The report: one HTML file that shows what one run did, or compares several, and opens without a network.

:func:`write_report` writes it from what a run left in its folder (``lightning_mp.run_folder``); ``lightning-mp report``
is the same on the command line. A broken file costs what was in it, never the report; the page says what is missing.
"""

from lightning_mp.report.writing import write_report

__all__ = ["write_report"]
