"""From a fleet's own sources to a dataset that can be assessed.

history     the history of a Prometheus, and files, into one dataset, and what has to be asked before
estimates   how long that and the assessment take
"""
