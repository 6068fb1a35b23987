"""The control loop: reads scores, facts and the fleet, and writes node markers and a report.

Start with ``controller``, which runs one round. ``executor`` carries out its actions, and re-reads and re-validates the
node before each write. ``releases`` depends on no decision. ``evidence`` joins scores (``scores_reader``) and facts
(``facts``) with the nodes.
"""
