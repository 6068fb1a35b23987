"""Events in, labels out: what an event says of a unit, which incidents form, and whether one starts in the horizon.

Start with :mod:`features.labels.evidence` (which XIDs and events count as failures), then
:mod:`features.labels.incidents` and :mod:`features.labels.labelling`. Everything here respects known-at times.
"""
