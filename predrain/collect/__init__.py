"""``predrain collect``: telemetry, events and jobs from where they are into a dataset's landing folder.

One module a source, and ``compact``, which folds what has landed into the dataset. The work is done in
:mod:`telemetry.collect` and :mod:`telemetry.landing`; here are options, settings and what is shown. Start reading at
``command``.
"""
