"""The tier of a node: ``node_assessment`` takes the higher of what its risk (``hysteresis``) and ``hard_rules`` say."""
