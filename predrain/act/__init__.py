"""``predrain act``: from scores to taints and drains.

``command`` has the verb; ``assembly`` creates the scheduler adapter, its evacuation and diagnostics, and the history
that past alerts are evaluated with.
"""
