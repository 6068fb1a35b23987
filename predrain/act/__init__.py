"""``predrain act``: from scores to taints and drains.

``command`` holds the verb; ``assembly`` puts together the scheduler that is acted on, what empties its nodes and where
facts come from; ``dataset_history`` tells the controller what became of earlier alerts.
"""
