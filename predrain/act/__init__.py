"""``predrain act``: from scores to taints and drains.

``command`` holds the verb; ``assembly`` puts together the scheduler that is acted on, its evacuation and diagnostics,
and the history by which earlier alerts are evaluated.
"""
