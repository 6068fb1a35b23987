"""From risk to decision, without I/O: what a fleet looks like comes in, a plan with its reasons goes out.

Start with ``decide``: ``node_tier`` finds each node's tier (it falls at once when its prediction expires), ``ladder``
the actions that pay. Then ``limits`` applies ``stages`` (and their hold-out), ``breaker`` and ``budget`` (nodes out at
the same time). ``tiers`` holds a risk to its thresholds, which :mod:`evaluation.backtest.threshold_choice` finds.
"""
