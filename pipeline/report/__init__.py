"""The report of a backtest: one self-contained HTML page.

Start with ``report``, which fills the template. ``terminal`` prints the table that ends ``make run``.
"""
