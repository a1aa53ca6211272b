"""The doctor: what will go wrong in a run, found before its first step."""

from lightning_mp.monitor.doctor.examine import doctor, examine, warn_at_fit

__all__ = ["doctor", "examine", "warn_at_fit"]
