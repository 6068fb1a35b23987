"""Models: a feature matrix in, a trained bundle out; sliding training over time is in ``evaluation/backtest``.

``rows/`` reads and selects training rows, ``learners/`` and ``sequence/`` are single models, ``ensembles`` combines
them, ``calibration/`` maps scores to risks, ``training/`` runs a refit, ``bundle/`` saves it, ``registry/`` manages the
champion, ``explanation/`` attributes scores to features. Imports ``features`` (column vocabulary and matrix), never
``telemetry``.
"""
