"""Questions that only the owner of the tables can answer, asked together and before any long work.

``guesses``: what unknown columns may be. ``questions``: these and everything else that the first rows leave open, with
the mapping to check that answers it. ``trial``: what an import of each table would ask beyond that.
"""
