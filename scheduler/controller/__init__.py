"""Decides in rounds and acts: scores, facts and a scheduler's fleet come in, confirmed marks and a report go out.

Start with ``controller``: one round. ``executor`` carries its actions out, re-reading and re-validating before each
write; ``evidence`` joins scores (``scores_reader``) and facts (``facts``) with the nodes.
"""
