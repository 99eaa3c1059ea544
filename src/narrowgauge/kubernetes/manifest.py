"""The manifests of one run: a Job as hardened as our containers elsewhere, and what it needs. Pure.

The lab in the pod resolves and records the run itself, into the results claim.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from narrowgauge.errors import BadValueError
from narrowgauge.kubernetes.asking import KubernetesAsk
from narrowgauge.plan import JobRequest, User
from narrowgauge.rendezvous import DEFAULT_PORT
from narrowgauge.targets import Accelerator, Target

__all__ = ["TARGET_LABEL", "manifests"]

TARGET_LABEL = "narrowgauge.io/target"
_APP = {"app.kubernetes.io/name": "narrowgauge"}
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
#: Node-local disk for compilers' and tuners' caches.
_CACHE_SIZE = "8Gi"
#: PodSpec.hostnames are cut at 63 characters, `-<index>` included.
_LONGEST_NAME = 50


def manifests(
    request: JobRequest, target: Target, ask: KubernetesAsk, user: User
) -> tuple[dict[str, Any], ...]:
    """What `kubectl apply` takes, in its order. Raises BadValueError for a root user: the cluster's
    restricted profile runs none."""
    # unverified: Jobs on a cluster | none at hand; schemas only | plan --executor kubernetes, apply
    if user.uid == 0:
        raise BadValueError(
            "a pod does not run as root",
            why="the restricted pod security profile refuses it",
            next_step="plan it as another user, whose uid may write to the results claim",
        )
    name = _name(request, target, ask)
    labels = {**_APP, "narrowgauge.io/experiment": request.experiment, "narrowgauge.io/run": name}
    meta = {"name": name, "namespace": ask.namespace, "labels": labels}
    found: list[dict[str, Any]] = []
    if ask.nodes == 1:
        found.append(_no_network(meta, name))
    else:
        found.append(_service(meta, name))
    spec: dict[str, Any] = {
        "backoffLimit": 0,
        "activeDeadlineSeconds": 3600 * ask.hours,
        "completions": ask.nodes,
        "parallelism": ask.nodes,
        "completionMode": "Indexed",
        "template": {
            "metadata": {"labels": labels},
            "spec": _pod(request, target, ask, user, name),
        },
    }
    found.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec})
    return tuple(found)


def _name(request: JobRequest, target: Target, ask: KubernetesAsk) -> str:
    """The same for the same request: applied twice it is one Job, not two. Another target, image or
    machine is another request."""
    where = (target.name, ask.image, ask.nodes, _gpus(target, ask), ask.cpu, ask.memory)
    words = (request.profile, request.seed, *where, ask.selector, *request.parameters)
    said = "\0".join(str(word) for word in words)
    stem = re.sub(r"[^a-z0-9-]", "-", f"narrowgauge-{request.experiment}".lower())
    return f"{stem[: _LONGEST_NAME - 11]}-{hashlib.sha256(said.encode('utf-8')).hexdigest()[:10]}"


def _pod(
    request: JobRequest, target: Target, ask: KubernetesAsk, user: User, name: str
) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "nodeSelector": {TARGET_LABEL: target.name, **_selector(ask.selector)},
        # One measuring run a machine: two would measure each other.
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
            {"labelSelector": {"matchLabels": _APP}, "topologyKey": "kubernetes.io/hostname"}
        ]}},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user.uid,
            "runAsGroup": user.gid,
            "fsGroup": user.gid,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(request, target, ask, name)],
        "volumes": [
            {"name": "results", "persistentVolumeClaim": {"claimName": ask.results}},
            {"name": "tmp", "emptyDir": {"medium": "Memory"}},
            {"name": "cache", "emptyDir": {"sizeLimit": _CACHE_SIZE}},
        ],
    }  # fmt: skip
    if ask.data:
        claim = {"claimName": ask.data, "readOnly": True}
        pod["volumes"].append({"name": "data", "persistentVolumeClaim": claim})
    if ask.nodes > 1:
        pod["subdomain"] = name
    return pod


def _container(
    request: JobRequest, target: Target, ask: KubernetesAsk, name: str
) -> dict[str, Any]:
    arguments = ["run", request.experiment, "--profile", request.profile]
    arguments += ["--seed", str(request.seed), "--target", target.name, "--results", "/results"]
    arguments += [word for each in request.parameters for word in ("-p", each)]
    mounts: list[dict[str, Any]] = [
        {"name": "results", "mountPath": "/results"},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "cache", "mountPath": "/cache"},
    ]
    if ask.data:
        arguments += ["--data", "/data"]
        mounts.append({"name": "data", "mountPath": "/data", "readOnly": True})
    amounts: dict[str, Any] = {"cpu": ask.cpu, "memory": ask.memory}
    if _gpus(target, ask):
        amounts["nvidia.com/gpu"] = str(_gpus(target, ask))
    return {
        "name": "lab",
        "image": ask.image,
        "args": arguments,
        "env": [
            {"name": "HOME", "value": "/cache"},
            {"name": "LOGNAME", "value": "narrowgauge"},
            *_meeting(ask, name),
        ],
        "resources": {"requests": amounts, "limits": amounts},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": target.read_only_root,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _meeting(ask: KubernetesAsk, name: str) -> list[dict[str, Any]]:
    """torchrun's variables: pod 0 has a name of its own in the headless service."""
    if ask.nodes == 1:
        return []
    said = {
        "MASTER_ADDR": f"{name}-0.{name}",
        "MASTER_PORT": str(DEFAULT_PORT),
        "WORLD_SIZE": str(ask.nodes),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    index = {"valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    return [
        *({"name": key, "value": value} for key, value in said.items()),
        {"name": "RANK", **index},
        {"name": "GROUP_RANK", **index},
    ]


def _service(meta: dict[str, Any], name: str) -> dict[str, Any]:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # they look for each other before any is ready
        "selector": {"narrowgauge.io/run": name},
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec}


def _no_network(meta: dict[str, Any], name: str) -> dict[str, Any]:
    """A run needs no network, and gets none, where the cluster's network plugin enforces it."""
    spec = {
        "podSelector": {"matchLabels": {"narrowgauge.io/run": name}},
        "policyTypes": ["Ingress", "Egress"],
    }
    kind = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
    return {**kind, "metadata": meta, "spec": spec}


def _gpus(target: Target, ask: KubernetesAsk) -> int:
    """How many GPUs a machine gives. Raises BadValueError where the target has or needs none."""
    has_gpus = Accelerator.NONE not in target.accelerators
    if ask.gpus is None:
        return int(has_gpus)
    if has_gpus and not ask.gpus:
        raise BadValueError(
            f"gpus=0: the target '{target.name}' is one of GPUs",
            next_step="--kubernetes gpus=1, or --on a target without",
        )
    if ask.gpus and not has_gpus:
        raise BadValueError(
            f"gpus={ask.gpus}: the target '{target.name}' has no GPU",
            next_step="leave gpus out, or --on a target that has one",
        )
    return ask.gpus


def _selector(text: str) -> dict[str, str]:
    found = {}
    for pair in filter(None, text.split(";")):
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise BadValueError(f"'{pair}' of the selector is not key=value")
        if key.strip() == TARGET_LABEL:
            raise BadValueError(
                f"the selector names {TARGET_LABEL}, which --on decides",
                next_step="leave it out of the selector: --on TARGET",
            )
        found[key.strip()] = value.strip()
    return found
