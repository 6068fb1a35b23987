"""Simulator room: a fleet that ages and fails, for demos, tests and benchmarks.

Imports ``telemetry``'s schema and store only; nothing but ``predrain``, tests and benchmarks imports it.
"""
