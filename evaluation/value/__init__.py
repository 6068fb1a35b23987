"""Value of acting on risks: GPU-hours that drains and taints would have saved, and what they would have cost.

Input: a fleet's scores, events and jobs. :mod:`~evaluation.value.controller_replay` replays the controller on
historical data, :mod:`~evaluation.value.gpu_hours` computes costs and savings, :mod:`~evaluation.value.verdict` decides
whether failures are predictable. :mod:`pipeline.assessment.workflow` combines them for ``predrain assess``.
"""
