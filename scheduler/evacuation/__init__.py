"""From a drain mark to an empty node: checkpoints, evictions, and the diagnostic that follows."""
