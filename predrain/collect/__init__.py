"""``predrain collect``: telemetry, events and jobs from where they are into a dataset's landing folder.

Modules by where a source is, and ``compact``, which merges what has landed into the dataset. The work is done in
:mod:`telemetry.collect` and :mod:`telemetry.landing`; here are options, settings and what is shown.
"""
