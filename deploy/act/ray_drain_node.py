#!/usr/bin/env python3
"""Command for ``evacuation.checkpoint``: drains the Ray nodes of a node, so that Ray Train writes a checkpoint in time.

Requires ``ray`` on the PATH, and RAY_ADDRESS (HOST:PORT of the head of the Ray cluster). It is done when the Ray nodes
have left. Ray must know the node by name or address; a pod has its own address, except in the host network. The head is
never drained, because the whole Ray cluster would end. For other jobs, the result is ``failed``: only jobs of Ray
should select ``command``.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from datetime import UTC, datetime

TIMEOUT_S = 10


def _ray(*command: str) -> str:
    argv = ["ray", *command]
    return subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True).stdout


def _drain(asked: dict[str, str]) -> dict[str, str]:
    names = {asked["node"]}
    with contextlib.suppress(OSError):  # Ray may know it by its name
        names.update(socket.gethostbyname_ex(asked["node"])[2])
    listed = json.loads(_ray("list", "nodes", "--format", "json", "--limit", "10000"))
    here = [node for node in listed if names & {node["node_ip"], node["node_name"]}]
    alive = [node for node in here if node["state"] == "ALIVE"]
    if any(node["is_head_node"] for node in alive):
        return {"state": "failed", "message": "the head of the Ray cluster is on it, and all of Ray would end with it"}
    if not alive:
        if any(asked["key"] in (node["state_message"] or "") for node in here):
            return {"state": "done", "message": "its Ray node has left"}
        return {"state": "failed", "message": "no Ray node is on it"}
    left_s = (datetime.fromisoformat(asked["deadline"]) - datetime.now(UTC)).total_seconds()
    for node in alive:  # also one that is drained already
        _ray(
            *("drain-node", "--node-id", node["node_id"], "--reason", "DRAIN_NODE_REASON_PREEMPTION"),
            *("--reason-message", f"predrain {asked['key']}: {asked['reason']}"),
            *("--deadline-remaining-seconds", str(max(1, int(left_s)))),
        )
    return {"state": "waiting", "message": "its Ray node drains"}


try:
    reply = _drain(json.load(sys.stdin))
except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:  # asked again until the deadline
    reply = {"state": "waiting", "message": f"Ray does not answer: {error}"}
print(json.dumps(reply))
sys.exit({"done": 0, "waiting": os.EX_TEMPFAIL}.get(reply["state"], 1))
