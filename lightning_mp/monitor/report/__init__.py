"""The report: one HTML file that shows what one run did, or compares several, and opens without a network.

:func:`write_report` writes it from what a run left in its folder (``lightning_mp.monitor.run_folder``), as
``lightning-mp report`` does. A broken file costs what was in it, never the report; the page says what is missing.
"""

from lightning_mp.monitor.report.write import write_report

__all__ = ["write_report"]
