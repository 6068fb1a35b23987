"""From risk to decision, without I/O: what a fleet looks like comes in, a plan with its reasons goes out.

Start with ``decide``: ``assess`` finds each node's tier (``tiers``, ``hysteresis``, ``hard_rules``), then ``stages``,
``breaker``, ``budget`` and ``cost_benefit`` lower what it gets. ``tiers`` also says what each tier must hold and takes
its threshold; ``thresholds`` computes from past decisions what a precision or a budget allows.
"""
