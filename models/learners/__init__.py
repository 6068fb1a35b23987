"""The learners and baselines by name, with settings that hold up when failures are rare.

In come a name and settings, out comes a scikit-learn classifier. Start with ``factory``.
"""
