"""From risk to decision, without I/O: what a fleet looks like comes in, a plan with its reasons goes out.

Start with ``decide``: ``node_tier`` finds each node's tier (it falls at once when its prediction expires), then
``stages``, ``breaker``, ``budget`` (nodes out at the same time) and ``cost_benefit`` lower what it gets. ``thresholds``
finds the risk at which a precision can be promised, a budget is kept or costs are least, from past decisions; ``tiers``
chooses which of these ``elevated`` and ``high`` take, and holds a score to it.
"""
