"""What watches a run: alerts, readings, the audit, the doctor, the report and the run's files."""
