"""Pipeline room: the stages that ``dvc.yaml`` runs, their parameters, and the report.

Start with ``stages``. ``params`` reads ``params.yaml``, whose sections are in the config modules of the rooms;
``promotion`` and ``retraining`` move the champion by the gate in ``evaluation``; ``health`` compares recent data with a
bundle's training data, ``tracking`` records runs; ``assessment`` and ``sources`` implement ``predrain assess``.
"""
