"""The report of a backtest: one self-contained HTML page on what was replayed and how often it was wrong."""
