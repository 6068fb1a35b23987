"""A real Kubernetes API server for tests: etcd and kube-apiserver on their own ports, in a folder of their own.

There is no scheduler, no controller and no kubelet: a test writes what those would write. Users are known by a token
each: ``admin``, and ``collector``, ``publisher`` and ``actuator``, who are the service accounts of
``deploy/kubernetes/*-rbac.yaml`` and may nothing until those files are applied.
"""

import contextlib
import json
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml

from tests.waiting import free_port, wait

BUILD_SCRIPT = Path(__file__).with_name("build_kubernetes.sh")
ACCOUNTS = ("collector", "publisher", "actuator")
READY_WITHIN_S = 120.0

_PLACES = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings",
    "PriorityClass": "/apis/scheduling.k8s.io/v1/priorityclasses",
}


def build_components(*components: str) -> Path:
    """Return the folder of the binaries; they are built if they are not there yet, which takes minutes.

    The test is skipped where the machine cannot get at Debian's sources, and fails where the build does.
    """
    built = subprocess.run(
        ["bash", BUILD_SCRIPT, *(components or ("kube-apiserver",))],
        stdout=subprocess.PIPE,
        text=True,
        timeout=3000,
        check=False,
    )
    if built.returncode == 3:
        pytest.skip("Kubernetes' sources cannot be had here: a Debian 12 with source packages in reach is needed")
    assert built.returncode == 0, "the control plane could not be built; what it printed is above"
    return Path(built.stdout.strip().splitlines()[-1])


class KubernetesServer:
    """etcd and an API server; use :func:`kubernetes_server_in`."""

    def __init__(self, folder: Path, binaries: Path) -> None:
        self.folder = folder
        self._binaries = binaries
        self._etcd_port, self._peer_port, self._port = free_port(), free_port(), free_port()
        self.url = f"https://127.0.0.1:{self._port}"
        self._tokens = {user: secrets.token_hex(16) for user in ("admin", *ACCOUNTS)}
        self._etcd: subprocess.Popen[bytes] | None = None
        self._api: subprocess.Popen[bytes] | None = None
        self._certificate = folder / "certs" / "apiserver.crt"
        self._pool = urllib3.PoolManager(maxsize=8, ca_certs=str(self._certificate))

    def start(self) -> None:
        """Start both and wait until they serve."""
        key = self.folder / "sa.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True, timeout=300)
        lines = [f'{self._tokens["admin"]},admin,admin,"system:masters"']
        lines += [
            f'{self._tokens[user]},system:serviceaccount:predrain:predrain-{user},{user},"system:serviceaccounts"'
            for user in ACCOUNTS
        ]
        (self.folder / "tokens.csv").write_text("\n".join(lines) + "\n")
        (self.folder / "tokens.csv").chmod(0o600)
        peer = f"http://127.0.0.1:{self._peer_port}"
        client = f"http://127.0.0.1:{self._etcd_port}"
        self._etcd = self._run(
            "etcd",
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )
        self.start_api()
        wait(lambda: self.request("GET", "/api/v1/namespaces/default", check=False)[0] == 200)

    def start_api(self) -> None:
        """Start the API server on the port that it had before, and wait until it serves."""
        folder = self.folder
        self._api = self._run(
            "apiserver",
            str(self._binaries / "kube-apiserver"),
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._port}",
            "--insecure-port=0",
            f"--cert-dir={folder / 'certs'}",
            "--service-cluster-ip-range=10.0.0.0/24",
            f"--service-account-key-file={folder / 'sa.key'}",
            f"--service-account-signing-key-file={folder / 'sa.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--endpoint-reconciler-type=none",
            "--disable-admission-plugins=ServiceAccount",
        )
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline and self._api.poll() is None and self._etcd_runs():
            with contextlib.suppress(urllib3.exceptions.HTTPError):
                if self._certificate.exists() and self.request("GET", "/readyz", check=False)[0] == 200:
                    return
            time.sleep(0.1)
        log = "\n".join((folder / f"{name}.log").read_text()[-2000:] for name in ("etcd", "apiserver"))
        raise AssertionError(f"the API server did not become ready:\n{log}")

    def kill_api(self) -> None:
        """Kill the API server, as a crash would."""
        self._api.kill()
        self._api.wait(120)

    def stop(self) -> None:
        for process in (self._api, self._etcd):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait(120)
        self._pool.clear()

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        user: str = "admin",
        patch: str = "merge-patch",
        check: bool = True,
    ) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self._tokens[user]}"}
        if body is not None:
            form = "yaml" if patch == "apply-patch" else "json"  # which JSON is, too
            headers["Content-Type"] = f"application/{patch}+{form}" if method == "PATCH" else "application/json"
        answer = self._pool.request(
            method,
            f"{self.url}{path}",
            headers=headers,
            body=None if body is None else json.dumps(body),
            retries=False,
            timeout=300,
        )
        content: Any = answer.data.decode()
        with contextlib.suppress(ValueError):
            content = json.loads(content)
        assert not check or answer.status < 300, f"{method} {path}: {answer.status} {content}"
        return answer.status, content

    def apply(self, file: Path) -> None:
        """Create the objects of a manifest."""
        for item in yaml.safe_load_all(file.read_text()):
            namespace = item["metadata"].get("namespace", "")
            status, content = self.request("POST", _PLACES[item["kind"]].format(namespace=namespace), item, check=False)
            assert status in (201, 409), content

    def kubeconfig(self, user: str) -> Path:
        path = self.folder / f"{user}.kubeconfig"
        cluster = {"server": self.url, "certificate-authority": str(self._certificate)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": self._tokens[user]}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(content))
        path.chmod(0o600)
        return path

    def _run(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            environment = {key: value for key, value in os.environ.items() if not key.startswith("ETCD")}
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def _etcd_runs(self) -> bool:
        return self._etcd is not None and self._etcd.poll() is None


@contextlib.contextmanager
def kubernetes_server_in(folder: Path, *components: str) -> Iterator[KubernetesServer]:
    """Run a server until the block ends; its binaries are built first where they are missing."""
    server = KubernetesServer(folder, build_components(*components))
    try:
        server.start()
        yield server
    finally:
        server.stop()
