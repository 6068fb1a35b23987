"""Online state: the samples that features look back on, kept in memory as they arrive."""
