"""A cluster in memory or in a JSON file, with its workloads: for rehearsals, tests, and tooling that follows a file.

Start with ``memory``; ``cluster_file`` and ``workloads_file`` keep the same in files under a lock.
"""
