"""The Kubernetes adapter: a fleet from nodes and pods, and each action as one patch that the server checks.

In: actions of the controller and the steps of an evacuation. Out: labels, annotations, taints, a condition, an event,
evictions, Jobs; state and switches in ConfigMaps, and a Lease that fences all of it.

Start with ``scheduler`` (the port of the controller) and ``workloads`` (that of the evacuation: requests to pods, and
evictions, where a 429 means that a disruption budget says not yet). ``nodes`` reads a node and makes its patch;
which taints and labels an action sets is in :mod:`scheduler.ports.node_object`. ``pods`` reads pods as jobs,
``placement`` decides whether a pod could run on another node, ``restarts`` whether its controller starts it again;
``leadership`` is the Lease. The client itself, with retries, rate and 410, is :mod:`foundation.kubernetes.client`.
"""
