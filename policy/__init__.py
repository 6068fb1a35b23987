"""From risk to decision, without I/O: what a fleet looks like comes in, a plan with its reasons goes out.

Start with ``decide``: ``assess`` finds each node's tier (``tiers``, ``hysteresis``, hard rules), then ``stages``,
``breaker``, ``budget`` and ``cost_benefit`` lower what it gets. ``thresholds`` chooses the risk from which a
node is ``elevated`` or ``high``, from past decisions by a precision, a budget or costs; ``tiers`` holds a score to it.
"""
