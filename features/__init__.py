"""Features: a dataset in; incidents, labels and the feature matrix out. Imports ``telemetry`` and ``foundation``.

``labels/`` turns events into incidents and labels, ``windows/`` holds the compiled window kernels, ``groups/`` the
feature groups, and ``matrix/`` builds and extends the matrix and computes live rows. ``selection`` detects telemetry
that was collected only around failures; ``wording`` holds the phrases of alert reasons. Start with
:mod:`features.matrix.building`. An event is usable from its known-at time (:func:`features.labels.facts.reported`).
"""
