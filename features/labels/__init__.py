"""Events in, labels out: what an event says of a unit, which incidents form, and whether one starts in the horizon.

The XIDs that are failures are the parameter ``labels.xids`` (defaults in :mod:`features.config`);
:mod:`features.labels.facts` reads events, and :mod:`features.labels.evidence` says when a listed XID or another event
counts, and which failure a ticket belongs to. Then read :mod:`features.labels.incidents`,
:mod:`features.labels.node_incidents` and :mod:`features.labels.labelling`. Everything here respects known-at times.
"""
