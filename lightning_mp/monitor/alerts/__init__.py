"""The rules that watch a run's numbers and report when something looks wrong; no torch here.

:class:`Alerts` is handed one :class:`Reading` after another and answers with events; :class:`AlertSettings` holds every
threshold. Each rule is a small state machine in a file of its own.
"""

from lightning_mp.monitor.alerts.alerts import Alerts
from lightning_mp.monitor.alerts.reading import Reading
from lightning_mp.monitor.alerts.settings import RULE_KINDS, AlertSettings

__all__ = ["RULE_KINDS", "AlertSettings", "Alerts", "Reading"]
