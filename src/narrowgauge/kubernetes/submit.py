"""Manifests as text, held against the published schemas, and handed to a cluster by the official
client."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from narrowgauge.errors import (
    ClusterRefused,
    ClusterUnreachable,
    NarrowgaugeError,
    ToolchainMissing,
)

__all__ = ["SCHEMAS", "manifest_text", "submit", "validate"]

#: What was created: the call that removes it, its kind, name and namespace.
_Made = tuple[Callable[..., Any], str, str, str]

#: The release whose schemas the manifests must meet; their fields are stable since 1.24.
SCHEMAS = "1.31"


def manifest_text(documents: Sequence[dict[str, Any]]) -> str:
    """YAML for `kubectl apply -f`."""
    yaml = _import("yaml")
    plain = json.loads(json.dumps(documents))  # or what two places share would become an alias
    text: str = yaml.safe_dump_all(plain, sort_keys=False, default_flow_style=False)
    return text


def validate(documents: Sequence[dict[str, Any]]) -> None:
    """Strictly, so that a misspelt field is one. Raises ClusterRefused, ToolchainMissing."""
    schemas = _import("kubernetes_validate")
    for document in documents:
        try:
            schemas.validate(document, SCHEMAS, strict=True)
        except schemas.ValidationError as error:
            raise ClusterRefused(
                f"the {document['kind']} is no {document['kind']} of Kubernetes {SCHEMAS}",
                why=str(getattr(error, "message", error)),
                next_step="a label, name or quantity that was given is in it; mend that",
            ) from error


# unverified: submission to Kubernetes | a stub of the API only | run --executor kubernetes
def submit(documents: Sequence[dict[str, Any]], client: Any | None = None) -> list[str]:
    """Create what is not there; the names. `client`: an ApiClient, by default of the current
    context of the user's kubeconfig. What was created is removed where a later one is refused.

    Raises ClusterUnreachable, ClusterRefused, ToolchainMissing.
    """
    kubernetes = _import("kubernetes")
    if client is None:
        try:
            kubernetes.config.load_kube_config()
        except (kubernetes.config.ConfigException, OSError) as error:
            raise ClusterUnreachable(
                "no Kubernetes cluster is configured here",
                why=str(error),
                next_step="`kubectl config get-contexts` shows what is; KUBECONFIG names the file",
            ) from error
        client = kubernetes.client.ApiClient()
    made: list[_Made] = []
    try:
        for document in documents:
            create, delete = _calls(kubernetes.client, client, document["kind"])
            meta = document["metadata"]
            _ask(kubernetes, document, create)
            made.append((delete, document["kind"].lower(), meta["name"], meta["namespace"]))
    except NarrowgaugeError as error:
        left = _remove(kubernetes, made)
        if left:
            error.next_step += f"\nthen remove what was made before it: {left}"
        raise
    return [f"{document['kind'].lower()}/{document['metadata']['name']}" for document in documents]


def _remove(kubernetes: Any, made: Sequence[_Made]) -> str:
    """Remove it, newest first; how to remove by hand what could not be."""
    import urllib3.exceptions

    left = []
    for delete, kind, name, namespace in reversed(made):
        try:
            delete(name, namespace)
        except (kubernetes.client.ApiException, urllib3.exceptions.HTTPError):
            left.append(f"kubectl delete --namespace {namespace} {kind} {name}")
    return "; ".join(left)


def _calls(api: Any, client: Any, kind: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    if kind == "Job":
        batch = api.BatchV1Api(client)
        return batch.create_namespaced_job, batch.delete_namespaced_job
    if kind == "NetworkPolicy":
        net = api.NetworkingV1Api(client)
        return net.create_namespaced_network_policy, net.delete_namespaced_network_policy
    core = api.CoreV1Api(client)
    return core.create_namespaced_service, core.delete_namespaced_service


def _ask(kubernetes: Any, document: dict[str, Any], create: Callable[..., Any]) -> None:
    import urllib3.exceptions

    kind, name = document["kind"], document["metadata"]["name"]
    try:
        create(document["metadata"]["namespace"], document)
    except kubernetes.client.ApiException as error:
        exists = error.status == 409
        raise ClusterRefused(
            f"the cluster did not take the {kind} {name}",
            why=f"{error.status} {error.reason}: {str(error.body or '')[:400]}",
            next_step=f"it runs or ran already: kubectl get {kind.lower()} {name}; to run it again:"
            f" kubectl delete {kind.lower()} {name}"
            if exists
            else f"`kubectl auth can-i create {kind.lower()}` says whether you may",
        ) from error
    except urllib3.exceptions.HTTPError as error:
        raise ClusterUnreachable(
            "the Kubernetes API does not answer",
            why=str(error)[:400],
            next_step="`kubectl cluster-info` asks the same",
        ) from error


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ToolchainMissing(
            f"the kubernetes executor needs {name}, which is not installed",
            next_step=f"{sys.executable} -m pip install 'narrowgauge[kubernetes]'",
        ) from error
