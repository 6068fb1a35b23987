"""Models room: a feature matrix in, a trained bundle out; sliding training over time is in ``evaluation/backtest``.

``rows/`` reads and chooses training rows, ``learners/`` and ``sequence/`` are single models, ``ensembles/`` combines
them, ``calibration/`` makes risks, ``training/`` fits all of it, ``bundle/`` stores it, ``registry/`` keeps the
champion, ``explanation/`` gives reasons. Imports ``features`` (its column vocabulary and matrix); never ``telemetry``.
"""
