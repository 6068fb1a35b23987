"""Decision logic without I/O: maps the state of a fleet and its risks to a plan of actions with reasons.

Start with ``decide``: ``node_tier`` determines each node's tier, ``ladder`` the cost-effective actions. ``limits`` then
applies ``stages`` (with their hold-out), ``breaker`` and ``budget`` (nodes out of service at a time). ``tiers`` maps
risks to tiers by thresholds, which :mod:`evaluation.backtest.threshold_choice` sets.
"""
