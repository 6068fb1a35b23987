"""Ladder of actions on a node at risk, each with its own cost and break-even risk.

``rungs`` defines and prices the actions, ``cost_benefit`` evaluates drains, ``probes`` selects idle nodes for
diagnostics, ``requests`` requests probes and checkpoints, ``remedies`` maps faults to recovery actions.
"""
