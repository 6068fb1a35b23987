"""Pipeline room: the stages that ``dvc.yaml`` runs, their parameters, and the report."""
