"""The value of acting on risks: jobs that failures would have hit, and what drains and taints would have cost.

In come a fleet's scores, events and jobs. :mod:`~evaluation.value.controller_replay` runs the controller's decisions on
its past, :mod:`~evaluation.value.gpu_hours` counts what the marks are worth, :mod:`~evaluation.value.verdict` says
whether failures are predictable; :mod:`pipeline.assessment.workflow` puts them together for ``predrain assess``.
"""
