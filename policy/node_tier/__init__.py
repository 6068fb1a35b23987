"""Tier of a node: ``node_assessment`` takes the higher of the tiers by risk (``hysteresis``) and by ``hard_rules``."""
