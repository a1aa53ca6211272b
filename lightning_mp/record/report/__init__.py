"""The report: one HTML file that shows what one run did, or compares several, and opens without a network.

:func:`write_report` writes it from what a run left in its folder (``lightning_mp.record.run_folder``), as
``lightning-mp report`` does. A damaged file costs what was in it, never the report; the page says what is missing.
Pages of other packages share its look: see :mod:`lightning_mp.record.report.page`.
"""

from lightning_mp.record.report.page import summaries, write_report

__all__ = ["summaries", "write_report"]
