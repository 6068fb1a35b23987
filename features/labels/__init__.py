"""Labels: interpret events, group them into incidents, and label decision rows.

``labels.xids`` lists the XIDs that count as failures (defaults in :mod:`features.config`). :mod:`features.labels.facts`
parses events; :mod:`features.labels.evidence` decides when conditional XIDs and other events count, and
:mod:`features.labels.tickets` which failure a ticket belongs to. Continue with :mod:`features.labels.incidents`,
:mod:`features.labels.node_incidents` and :mod:`features.labels.labelling`. All modules respect known-at times.
"""
