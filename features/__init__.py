"""Features room: from a dataset to incidents, labels and the feature matrix. Imports ``telemetry`` only."""
