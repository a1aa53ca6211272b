"""Monitoring: measurements, alerts, non-finite steps, the audit, the doctor, the report and the run's files."""
