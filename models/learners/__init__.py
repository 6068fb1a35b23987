"""Learners and baselines by name, with default settings for rare failures.

Start with ``factory``, which turns a name and settings into a scikit-learn classifier.
"""
