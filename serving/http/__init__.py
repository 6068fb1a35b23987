"""The HTTP service: answers from the newest scores, for scripts, people and schedulers.

Nothing here imports pandas, numpy or a learner until feature rows are to be scored.
"""
