"""``predrain act``: from scores to taints and drains.

``command`` holds the verb; ``scheduler_choice`` reaches what is acted on, ``evacuating`` puts together what empties
nodes, and ``dataset_history`` tells the controller what became of earlier alerts.
"""
