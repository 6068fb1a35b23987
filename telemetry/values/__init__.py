"""Parsing of single values from any source: sentinels, units, words, dates, names of metrics.

The catalogues are the CSV files next to the modules. Independent of files, channels and datasets.
"""
