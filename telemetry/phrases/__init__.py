"""What people write about hardware (drain reasons, tickets, types of events), classified in context.

``phrases.yaml`` is the catalogue, ``classifier`` applies it. Slurm, tickets, imports and Kubernetes share it.
"""
