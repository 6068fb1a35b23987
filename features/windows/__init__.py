"""Samples in, window statistics out: the compiled kernels that training matrices and live rows share.

:mod:`~features.windows.blocks` lays samples out as arrays, :mod:`~features.windows.pane_index` sums stretches of time
once. :mod:`~features.windows.gauges` and :mod:`~features.windows.counters` (resets included, enums and bitmasks too)
hold the kernels, :mod:`~features.windows.window_plan` says which channel gets which. A reset is read in the same way in
:mod:`telemetry.importing.samples.rollup`: change both.
"""
