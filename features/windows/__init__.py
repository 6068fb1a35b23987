"""Window statistics of samples: compiled kernels shared by training matrices and live rows.

:mod:`~features.windows.blocks` lays samples out as arrays, :mod:`~features.windows.pane_index` indexes pre-aggregated
spans of time. :mod:`~features.windows.gauges` and :mod:`~features.windows.counters` (also for enums and bitmasks) hold
the kernels, :mod:`~features.windows.window_plan` assigns statistics to channels. Counter resets are handled in the same
way in :mod:`telemetry.importing.samples.rollup`: change both.
"""
