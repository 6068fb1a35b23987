"""What a single value means, whichever way it came in: sentinels, units, words, dates, names of metrics.

The catalogues are the CSV files next to the modules. Nothing here knows files, channels or datasets.
"""
