"""Credentials of the Kubernetes client: the only module that imports the ``kubernetes`` package.

The package loads them (kubeconfig, service account with token rotation, plug-ins) and creates the connection pool.
"""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import yaml
from kubernetes import config
from kubernetes.client import ApiClient, Configuration
from kubernetes.config import exec_provider, kube_config
from kubernetes.config.config_exception import ConfigException

from foundation.errors import InputError
from foundation.kubernetes.api import DEFAULT_LIMITS, ClientLimits
from foundation.kubernetes.client import Credentials, KubernetesClient

_IN_CLUSTER_TOKEN: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_PLUGIN_S: Final = 60.0


class _Plugin(subprocess.Popen[str]):
    """Process of a credential plug-in that is killed after a timeout, because the package sets none."""

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        try:
            return super().communicate(input, timeout or _PLUGIN_S)
        except subprocess.TimeoutExpired:
            self.kill()
            with self:  # closes its pipes
                raise


exec_provider.subprocess = kube_config.subprocess = SimpleNamespace(Popen=_Plugin, PIPE=subprocess.PIPE)


def connect(
    kubeconfig: Path | None = None,
    context: str | None = None,
    *,
    limits: ClientLimits = DEFAULT_LIMITS,
    agent: str = "predrain",
) -> KubernetesClient:
    """Connect by ``kubeconfig``, else the pod's service account, else like ``kubectl``; may raise ``InputError``."""
    configuration = _configuration(kubeconfig, context)

    def renew() -> Credentials:
        renewed = _configuration(kubeconfig, context)
        if renewed.host != configuration.host:  # the current context of a kubeconfig may have changed
            raise ConfigException("the configuration names another server")
        return _credentials(renewed)

    pool, headers = _credentials(configuration)
    return KubernetesClient(pool, configuration.host, headers, limits=limits, agent=agent, renew=renew)


def _configuration(kubeconfig: Path | None, context: str | None) -> Configuration:
    configuration = Configuration()
    in_cluster = kubeconfig is None and context is None and _IN_CLUSTER_TOKEN.exists()
    in_cluster = in_cluster and "KUBERNETES_SERVICE_HOST" in os.environ
    location = str(kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config")
    try:
        if in_cluster:
            location = "the pod's service account"
            config.load_incluster_config(client_configuration=configuration)
        else:
            config.load_kube_config(
                config_file=None if kubeconfig is None else str(kubeconfig),
                context=context,
                client_configuration=configuration,
                persist_config=False,
            )
    except (
        ConfigException, yaml.YAMLError, subprocess.TimeoutExpired, OSError, ValueError, KeyError, TypeError,
        AttributeError,
    ) as error:  # fmt: skip
        reason = str(error).strip().splitlines()
        raise InputError(
            f"no connection to the Kubernetes API server: {reason[0] if reason else type(error).__name__}",
            location,
            "Give --kubeconfig and --context (predrain act: kubernetes.kubeconfig and kubernetes.context in its "
            "settings), or run in a pod with a service account.",
        ) from error
    configuration.connection_pool_maxsize = 8
    return configuration


def _credentials(configuration: Configuration) -> Credentials:
    def headers() -> dict[str, str]:
        token = configuration.auth_settings().get("BearerToken")
        return {"Authorization": token["value"].strip()} if token and token["value"] else {}

    return ApiClient(configuration).rest_client.pool_manager, headers
