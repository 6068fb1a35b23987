"""The report of a backtest: one self-contained HTML page that says what was replayed and how often it was wrong."""

from pipeline.report.context import AlertEntry, ReportContext, Simulated, select_alerts
from pipeline.report.report import write_report

__all__ = ["AlertEntry", "ReportContext", "Simulated", "select_alerts", "write_report"]
