"""What a Kubernetes API server knows: where exporters are, what was done to nodes, which pods held GPUs."""
