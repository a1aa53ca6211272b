"""The report: one HTML file that shows one run, or compares several, and opens without a network.

:func:`write_report`, like ``lightning-mp report``, writes it from the files of a run's folder
(``lightning_mp.record.run_folder``). Damaged files and lines are left out, and the page names them.
Other pages share its look: see :mod:`lightning_mp.record.report.page`.
"""

from lightning_mp.record.report.page import summaries, write_report

__all__ = ["summaries", "write_report"]
