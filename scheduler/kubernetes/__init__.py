"""The Kubernetes adapter: reads the fleet from nodes and pods, and carries out each action as one patch.

It writes labels, annotations, taints, a node condition, evictions and Jobs. State and switches are in
ConfigMaps, and a Lease fences all writes.

Start with ``scheduler`` (port of the controller) and ``workloads`` (port of the evacuation: checkpoint requests and
evictions). ``nodes`` reads a node and builds its patch; :mod:`scheduler.ports.node_object` defines which taints and
labels an action sets. ``pods`` maps pods to jobs, ``placement`` decides whether a pod could run on another node, and
``restarts`` whether its controller would restart it. ``leadership`` is the Lease. The client with retries and rate
limits is :mod:`foundation.kubernetes.client`.
"""
