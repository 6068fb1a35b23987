"""Models room: learners, ensembles, sliding training, calibration, evaluation, bundle and registry.

Imports ``features`` (its column vocabulary and matrix); never ``telemetry``.
"""
