"""The ladder of actions on a node at risk, each with its own cost, break-even and evidence.

``rungs`` names the actions and weighs them, ``probes`` chooses idle nodes for a diagnostic within a budget,
``remedies`` is what ends a fault that a hard rule names.
"""
