"""Helpers of the benchmarks: parts in their own process, generated telemetry, the compile time of the kernels."""
