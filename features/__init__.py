"""Features room: a dataset in, incidents, labels and the feature matrix out. Imports ``telemetry`` only.

``labels/`` turns events into incidents and labels, ``windows/`` holds the compiled window kernels, ``groups/`` the
feature groups, and ``matrix/`` builds and extends the matrix and makes live rows. ``selection`` tells whether telemetry
exists only around failures; ``wording`` has the words of reasons. Start with :mod:`features.matrix.building`. An event
counts from when it was known: :func:`features.labels.facts.reported` sets that time, and groups and labels leave out
what is known later than a decision.
"""
