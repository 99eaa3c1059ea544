"""Kubernetes manifests against the published schemas; submission against a stub of the API."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import kubernetes
import pytest
import yaml

from narrowgauge.checkout import Checkout
from narrowgauge.errors import (
    BadValueError,
    ClusterRefused,
    ClusterUnreachable,
    ExitCode,
    NarrowgaugeError,
    ToolchainMissing,
    UnknownNameError,
    UsageError,
)
from narrowgauge.kubernetes.asking import KubernetesAsk, parse_ask
from narrowgauge.kubernetes.manifest import TARGET_LABEL, manifests
from narrowgauge.kubernetes.submit import manifest_text, submit, validate
from narrowgauge.launch import World
from narrowgauge.launch_kubernetes import plan_kubernetes
from narrowgauge.machine import Host
from narrowgauge.plan import JobRequest, User
from narrowgauge.targets import load_targets

ROOT = Path(__file__).parents[2]
IMAGE = "registry.example/narrowgauge/desktop-next@sha256:" + "0123456789abcdef" * 4
ASK = KubernetesAsk(IMAGE, "results", data="data")
REQUEST = JobRequest("resnet", "paper", ("precision=fp32,bf16", "epochs=3"), 7)
TARGETS = load_targets(ROOT / "docker" / "targets.toml")
USER = User(1000, 1001)


def job_of(documents: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    return next(each for each in documents if each["kind"] == "Job")


def pod_of(documents: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    pod: dict[str, Any] = job_of(documents)["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize("nodes", [1, 3])
def test_what_is_written_meets_the_published_schemas(target: str, nodes: int) -> None:
    ask = KubernetesAsk(IMAGE, "results", nodes=nodes, selector="gpu=h100;zone=a")
    documents = manifests(REQUEST, TARGETS[target], ask, USER)
    validate(documents)
    read = list(yaml.safe_load_all(manifest_text(documents)))

    assert read == list(documents)
    assert [each["kind"] for each in read] == ["NetworkPolicy" if nodes == 1 else "Service", "Job"]
    assert pod_of(documents)["nodeSelector"] == {TARGET_LABEL: target, "gpu": "h100", "zone": "a"}


def test_a_pod_is_as_hardened_as_our_containers() -> None:
    documents = manifests(REQUEST, TARGETS["desktop-next"], ASK, USER)
    pod, lab = pod_of(documents), pod_of(documents)["containers"][0]

    assert lab["image"] == IMAGE
    assert lab["securityContext"]["allowPrivilegeEscalation"] is False
    assert lab["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert lab["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 1000
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert pod["restartPolicy"] == "Never"
    assert lab["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert lab["resources"]["limits"] == lab["resources"]["requests"]  # guaranteed, not best effort
    policy = documents[0]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policy
    writable = {m["mountPath"] for m in lab["volumeMounts"] if not m.get("readOnly")}
    assert writable == {"/results", "/tmp", "/cache"}


def test_the_lab_gets_the_words_and_the_cpu_target_no_gpu() -> None:
    lab = pod_of(manifests(REQUEST, TARGETS["cpu"], ASK, USER))["containers"][0]
    assert lab["args"] == [
        "run", "resnet", "--profile", "paper", "--seed", "7", "--target", "cpu",
        "--results", "/results", "-p", "precision=fp32,bf16", "-p", "epochs=3", "--data", "/data",
    ]  # fmt: skip
    assert "nvidia.com/gpu" not in lab["resources"]["limits"]


def test_several_nodes_meet_at_the_first_ones_name() -> None:
    ask = KubernetesAsk(IMAGE, "results", nodes=2)
    documents = manifests(REQUEST, TARGETS["desktop-next"], ask, USER)
    job, pod = job_of(documents), pod_of(documents)
    env = {each["name"]: each for each in pod["containers"][0]["env"]}
    name = job["metadata"]["name"]

    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert job["spec"]["completionMode"] == "Indexed"
    assert pod["subdomain"] == documents[0]["metadata"]["name"] == name
    assert env["MASTER_ADDR"]["value"] == f"{name}-0.{name}"
    assert (env["WORLD_SIZE"]["value"], env["LOCAL_WORLD_SIZE"]["value"]) == ("2", "1")
    assert "job-completion-index" in env["RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert documents[0]["spec"]["clusterIP"] == "None"


def test_a_name_is_of_the_request_and_fits() -> None:
    def name(request: JobRequest) -> str:
        found: str = job_of(manifests(request, TARGETS["cpu"], ASK, USER))["metadata"]["name"]
        return found

    other = JobRequest("resnet", "paper", ("precision=fp32,bf16", "epochs=4"), 7)
    long = JobRequest("x" * 80, "short", (), 0)
    assert name(REQUEST) == name(REQUEST) != name(other)
    asks = [
        ASK, dataclasses.replace(ASK, image=IMAGE[:-1] + "0"), dataclasses.replace(ASK, nodes=2),
        dataclasses.replace(ASK, gpus=2), dataclasses.replace(ASK, memory="8Gi"),
    ]  # fmt: skip
    names = {
        job_of(manifests(REQUEST, TARGETS["desktop-next"], ask, USER))["metadata"]["name"]
        for ask in asks
    }
    assert len(names | {name(REQUEST)}) == len(asks) + 1
    assert len(name(long)) <= 52  # 63 of a host's name, less the pod's index


@pytest.mark.parametrize(
    ("target", "ask", "said", "next_step"),
    [
        ("cpu", {"gpus": 1}, "has no GPU", "leave gpus out"),
        ("desktop-next", {"gpus": 0}, "is one of GPUs", "gpus=1"),
        ("cpu", {"selector": "zone=a;narrowgauge.io/target=xavier"}, "--on decides", "--on TARGET"),
    ],
)
def test_what_contradicts_the_target_is_refused(
    target: str, ask: dict[str, Any], said: str, next_step: str
) -> None:
    with pytest.raises(BadValueError, match=said) as caught:
        manifests(REQUEST, TARGETS[target], dataclasses.replace(ASK, **ask), USER)
    assert next_step in caught.value.next_step
    assert caught.value.exit_code == ExitCode.USAGE


def test_root_is_refused() -> None:
    with pytest.raises(BadValueError, match="not run as root"):
        manifests(REQUEST, TARGETS["cpu"], ASK, User(0, 0))


def test_a_manifest_that_no_schema_has_is_refused() -> None:
    documents = manifests(REQUEST, TARGETS["cpu"], ASK, USER)
    job_of(documents)["spec"]["backofLimit"] = 3
    with pytest.raises(ClusterRefused, match="no Job of Kubernetes") as caught:
        validate(documents)
    assert "backofLimit" in caught.value.why


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (["image=x:latest", "results=r"], BadValueError, "by its digest"),
        (["results=r"], UsageError, "needs to know the image"),
        ([f"image={IMAGE}"], UsageError, "needs to know the results"),
        ([f"image={IMAGE}", "results=Upper"], BadValueError, "no name of Kubernetes"),
        ([f"image={IMAGE}", "results=r", "memory=lots"], BadValueError, "no quantity"),
        ([f"image={IMAGE}", "results=r", "nodes=0"], BadValueError, "no number of nodes"),
        ([f"image={IMAGE}", "resutls=r"], UnknownNameError, "did you mean 'results'"),
        ([f"image={IMAGE}", "results=r", "results=q"], UsageError, "given twice"),
    ],
)
def test_each_slip_is_named(words: list[str], kind: type[NarrowgaugeError], said: str) -> None:
    with pytest.raises(kind) as caught:
        parse_ask(words)
    assert said in str(caught.value)


def world() -> World:
    return World(Checkout(ROOT), {}, Host("amd64"), print)


@pytest.mark.parametrize(
    ("request_", "ask", "on", "said"),
    [
        (REQUEST, ASK, None, "which target"),
        (REQUEST, KubernetesAsk(IMAGE, "results"), "cpu", "no claim holds data"),
        (JobRequest("resnet", "smoke", ("plan=mine.toml",), 0), ASK, "cpu", "is a file"),
        (JobRequest("resnet", "smoke", ("epochs=1,2",), 0), ASK, "cpu", "2 runs"),
    ],
)
def test_what_a_cluster_cannot_know_is_asked_for(
    request_: JobRequest, ask: KubernetesAsk, on: str | None, said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        plan_kubernetes(world(), request_, ask, on)
    assert said in str(caught.value)


# --- submission ----------------------------------------------------------------------------------


class StubApi:
    """Answers like an API server, and remembers. It is none: nothing is scheduled."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        self.refuse: dict[str, int] = {}
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"null")
                stub.calls.append((self.command, self.path, body))
                code = stub.refuse.get(f"{self.command} {self.path.rpartition('/')[2]}", 201)
                answer = body if code < 300 else {"kind": "Status", "message": "forbidden: stub"}
                text = json.dumps(answer or {}).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_POST = do_DELETE = _answer  # noqa: N815 - the base class's names

            def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
                return

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        configuration = kubernetes.client.Configuration()
        configuration.host = f"http://127.0.0.1:{self.server.server_port}"
        configuration.retries = False
        self.client = kubernetes.client.ApiClient(configuration)

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
        self.client.close()
        self.client.rest_client.pool_manager.clear()


@pytest.fixture
def api() -> Iterator[StubApi]:
    stub = StubApi()
    yield stub
    stub.close()


def test_the_official_client_sends_what_was_planned(api: StubApi) -> None:
    documents = manifests(REQUEST, TARGETS["desktop-next"], ASK, USER)
    names = submit(documents, api.client)

    assert [call[:2] for call in api.calls] == [
        ("POST", "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"),
        ("POST", "/apis/batch/v1/namespaces/default/jobs"),
    ]
    assert [call[2] for call in api.calls] == list(documents)
    assert names[-1] == f"job/{documents[-1]['metadata']['name']}"


@pytest.mark.parametrize(("code", "said"), [(403, "auth can-i"), (409, "kubectl delete")])
def test_a_refusal_leaves_nothing_and_says_what_to_do(api: StubApi, code: int, said: str) -> None:
    api.refuse = {"POST jobs": code}
    with pytest.raises(ClusterRefused, match="did not take the Job") as caught:
        submit(manifests(REQUEST, TARGETS["cpu"], ASK, USER), api.client)

    assert said in caught.value.next_step
    assert caught.value.exit_code == ExitCode.CLUSTER_REFUSED
    assert [call[0] for call in api.calls] == ["POST", "POST", "DELETE"]


def test_what_cannot_be_removed_does_not_hide_why(api: StubApi) -> None:
    documents = manifests(REQUEST, TARGETS["cpu"], ASK, USER)
    name = documents[0]["metadata"]["name"]
    api.refuse = {"POST jobs": 403, f"DELETE {name}": 500}
    with pytest.raises(ClusterRefused, match="did not take the Job") as caught:
        submit(documents, api.client)

    assert "auth can-i" in caught.value.next_step
    assert f"kubectl delete --namespace default networkpolicy {name}" in caught.value.next_step


def test_an_api_that_does_not_answer(api: StubApi) -> None:
    configuration = kubernetes.client.Configuration()
    configuration.host, configuration.retries = "http://127.0.0.1:9", False
    with kubernetes.client.ApiClient(configuration) as client:
        with pytest.raises(ClusterUnreachable, match="does not answer") as caught:
            submit(manifests(REQUEST, TARGETS["cpu"], ASK, USER), client)
        client.rest_client.pool_manager.clear()
    assert caught.value.exit_code == ExitCode.CLUSTER_UNREACHABLE


def test_a_host_without_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = kubernetes.config.kube_config
    monkeypatch.setattr(loader, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(ClusterUnreachable, match="no Kubernetes cluster is configured"):
        submit(manifests(REQUEST, TARGETS["cpu"], ASK, USER))


def test_without_the_client_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "kubernetes_validate", None)
    with pytest.raises(ToolchainMissing, match="kubernetes_validate") as caught:
        validate(())
    assert "narrowgauge[kubernetes]" in caught.value.next_step
