"""``predrain collect``: collects telemetry, events and jobs into a dataset's staging folder.

One module per kind of source, and ``compact``, which merges staged rows into the dataset. The work is done in
:mod:`telemetry.collect` and :mod:`telemetry.staging`; these modules have the options and the output.
"""
