"""Live sources of events and jobs: kernel logs, Slurm, tickets and diagnostics. Nothing here touches a dataset."""
