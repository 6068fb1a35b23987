"""``predrain collect``: telemetry, events and jobs from where they are into a dataset's staging folder.

Modules by where a source is, and ``compact``, which merges what is staged into the dataset. The work is done in
:mod:`telemetry.collect` and :mod:`telemetry.staging`; here are options, settings and what is shown.
"""
