"""From a fleet's own sources to a dataset that can be assessed.

check       what an import would ask about files, asked before anything long begins
history     the history of a Prometheus, and files, into one dataset
estimates   how long that and the assessment take
"""
