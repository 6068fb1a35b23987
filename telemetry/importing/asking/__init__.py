"""What only the owner of some tables can tell, asked all at once and before anything long begins.

``guesses``: what unknown columns may be. ``questions``: these and everything else that the first rows leave open, with
the mapping to check that answers it. ``trial``: what an import of each table would ask beyond that.
"""
