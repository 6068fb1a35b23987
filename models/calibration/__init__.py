"""From scores to risks that compare across time, at the main horizon and at further ones.

In come scores and labels of a later slice, out come maps to risks. Start with ``fitting``; ``horizons`` has the further
ones.
"""
