"""The value of acting on risks: jobs that failures would have hit, and what drains and taints would have cost."""
