"""Building, with a docker that only pretends: which client, which errors, what it is given."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import stat
from pathlib import Path

import pytest

from narrowgauge.errors import (
    BaseUnreachable,
    BuildFailed,
    DiskFull,
    DockerPermission,
    DockerUnavailable,
    ExitCode,
    NarrowgaugeError,
    StaleGenerated,
    ToolchainMissing,
    UnresolvedPins,
    UsageError,
)
from narrowgauge.images.base import registry_size, require_emulation
from narrowgauge.images.build import BuildRequest, build_image, ensure_image, make_context
from narrowgauge.images.client import find_client, translate
from narrowgauge.images.content import content_tag, image_name, source_hash, standin_name
from narrowgauge.images.render import render_dockerfile, write
from narrowgauge.targets import Builder, Target

ROOT = Path(__file__).parents[2]

#: Answers like docker; $FAKE holds its state, and every command is kept in $FAKE/log.
_DOCKER = """#!/bin/sh
echo "$DOCKER_BUILDKIT|$*" >>"$FAKE/log"
case "$1 $2" in
"buildx version") {buildx} ;;
"--version ") echo "Docker version {version}, build 1" ;;
"tag "*) echo "$3" >>"$FAKE/tags" ;;
"image inspect")
    if [ "$3" = "$(cat "$FAKE/base")" ] || grep -qxF "$3" "$FAKE/tags"; then
        echo '[{{"Id": "sha256:1", "RepoDigests": ["x@sha256:2"], "Size": 1000,
            "Architecture": "'"$(cat "$FAKE/architecture")"'",
            "Config": {{"Labels": {{"io.narrowgauge.standin": "true"}}}}}}]'
    else echo "Error: No such image: $3" >&2; exit 1; fi ;;
"version --format") cat "$FAKE/architecture" ;;
"info --format")
    case $3 in *RootDir*) echo "$FAKE" ;; *) cat "$FAKE/system" ;; esac ;;
"manifest inspect") cat "$FAKE/manifest" ;;
"pull "*)
    if [ -f "$FAKE/pull" ]; then cat "$FAKE/pull" >&2; exit 1; fi
    for base; do :; done
    echo "$base" >"$FAKE/base"; case $2 in --*) echo arm64 >"$FAKE/architecture" ;; esac ;;
"build "*|"buildx build")
    if [ -f "$FAKE/fail" ]; then cat "$FAKE/fail"; exit 1; fi ;;
"run "*) echo "source $(cat "$FAKE/source")" ;;
esac
"""


class FakeDocker:
    """A docker on a PATH of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {"PATH": f"/usr/bin:/bin:{folder}", "FAKE": str(folder)}
        (folder / "base").write_text("debian:test")
        (folder / "architecture").write_text("amd64\n")
        (folder / "system").write_text("Debian\n")
        (folder / "manifest").write_text("")
        (folder / "tags").write_text("")
        (folder / "source").write_text(source_hash(ROOT))
        self.version("20.10.24", buildx=False)

    def version(self, version: str, *, buildx: bool, where: str = "") -> None:
        path = self.folder / where / "docker"
        path.parent.mkdir(exist_ok=True)
        path.write_text(_DOCKER.format(version=version, buildx="exit 0" if buildx else "exit 1"))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def log(self) -> list[str]:
        return (self.folder / "log").read_text().splitlines()


@pytest.fixture
def docker(tmp_path: Path) -> FakeDocker:
    # The true docker must not be found: only the tools of a bare system are on this PATH.
    bare = tmp_path / "bin"
    bare.mkdir()
    for tool in ("sh", "cat", "grep"):
        (bare / tool).symlink_to(f"/bin/{tool}")
    (tmp_path / "fake").mkdir()
    fake = FakeDocker(tmp_path / "fake")
    fake.env["PATH"] = f"{fake.folder}:{bare}"
    fake.env.update(own_cache(tmp_path))
    return fake


def own_cache(folder: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(folder / "cache")}


def quiet(line: str) -> None:
    """Says nothing."""


def request(docker: FakeDocker, targets: dict[str, Target], root: Path = ROOT) -> BuildRequest:
    return BuildRequest(root, targets["cpu"], base="debian:test", env=docker.env)


def test_an_old_client_asks_the_engines_own_buildkit(docker: FakeDocker) -> None:
    client = find_client(Builder.BUILDKIT, docker.env)

    assert client.build_words() == (str(docker.folder / "docker"), "build")
    assert client.build_environment()["DOCKER_BUILDKIT"] == "1"


def test_a_new_client_needs_buildx_and_an_old_one_behind_it_will_do(docker: FakeDocker) -> None:
    docker.version("28.2.2", buildx=False)
    docker.version("20.10.24", buildx=False, where="old")
    docker.env["PATH"] += f":{docker.folder / 'old'}"

    assert find_client(Builder.BUILDKIT, docker.env).executable == f"{docker.folder}/old/docker"
    with pytest.raises(ToolchainMissing) as raised:
        find_client(Builder.BUILDX, docker.env)
    assert "version 28" in raised.value.why
    assert "version 20" in raised.value.why


def test_buildx_is_taken_where_it_is(docker: FakeDocker) -> None:
    docker.version("28.2.2", buildx=True)

    assert find_client(Builder.BUILDX, docker.env).build_words()[1:] == (
        "buildx",
        "build",
        "--load",
    )


def test_no_client_that_can_build_says_what_to_install(docker: FakeDocker) -> None:
    docker.version("28.2.2", buildx=False)

    with pytest.raises(ToolchainMissing, match="can build with BuildKit") as raised:
        find_client(Builder.BUILDKIT, docker.env)
    assert "docker-buildx" in raised.value.next_step
    assert raised.value.exit_code == ExitCode.TOOLCHAIN_MISSING


def test_no_docker_at_all(tmp_path: Path) -> None:
    with pytest.raises(DockerUnavailable, match="no docker command"):
        find_client(Builder.BUILDKIT, {"PATH": str(tmp_path)})


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        (
            "Got permission denied while trying to connect to the Docker daemon socket at "
            "unix:///var/run/docker.sock: dial unix: connect: permission denied",
            DockerPermission,
        ),
        (
            "permission denied while trying to connect to the docker API at unix:///var/run/docker.sock",
            DockerPermission,
        ),
        (
            "Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?",
            DockerUnavailable,
        ),
        ("failed to register layer: write /usr/lib/x: no space left on device", DiskFull),
        (
            "ERROR: BuildKit is enabled but the buildx component is missing or broken.",
            ToolchainMissing,
        ),
        ("executor failed running [/bin/sh -c pip install]: exit code: 1", BuildFailed),
        ("E: Package 'foo' not found", BuildFailed),
    ],
)
def test_what_docker_says_becomes_an_error_of_ours(
    output: str, kind: type[NarrowgaugeError]
) -> None:
    error = translate(output, "the build failed")

    assert type(error) is kind
    assert output[:40] in error.why
    assert error.next_step


@pytest.mark.parametrize(
    "output",
    [
        "Error response from daemon: Get https://registry-1.docker.io/v2/: dial tcp: lookup "
        "registry-1.docker.io: no such host",
        "Error response from daemon: manifest for python:9 not found: manifest unknown",
        "Error response from daemon: Head https://nvcr.io/v2/: unauthorized",
        "net/http: TLS handshake timeout",
        "dial tcp 1.2.3.4:443: i/o timeout",
    ],
)
def test_a_pull_that_reaches_nothing(output: str) -> None:
    error = translate(output, "it cannot be pulled", pulling="python:9")

    assert isinstance(error, BaseUnreachable)
    assert "python:9" in error.what
    assert "--executor native" in error.next_step
    assert error.exit_code == ExitCode.BASE_UNREACHABLE


def test_a_build_is_labelled_verified_and_aliased(
    docker: FakeDocker, targets: dict[str, Target]
) -> None:
    said: list[str] = []
    tag = content_tag(ROOT, targets["cpu"], standin_base="debian:test", standin_digest="sha256:2")

    facts = build_image(request(docker, targets), said.append)

    name = image_name(targets["cpu"], tag)
    assert facts.name == name
    assert facts.stand_in
    built = next(line for line in docker.log() if "|build " in line)
    assert built.startswith("1|build --progress=plain")
    for label in (
        f"io.narrowgauge.content={tag}",
        f"io.narrowgauge.source={source_hash(ROOT)}",
        "org.opencontainers.image.base.digest=sha256:2",
    ):
        assert f"--label {label}" in built
    verified = next(line for line in docker.log() if "|run " in line)
    for flag in ("--network=none", "--read-only", "--cap-drop=ALL", "no-new-privileges"):
        assert flag in verified
    tagged = [line.split("|tag ")[1] for line in docker.log() if "|tag " in line]
    own = standin_name(ROOT, targets["cpu"])
    assert tagged == [f"{name}-unchecked {name}", f"{name} narrowgauge/cpu:local", f"{name} {own}"]
    assert docker.log().index(verified) < next(
        number for number, line in enumerate(docker.log()) if "|tag " in line
    )
    assert any("building" in line for line in said)


def test_an_image_with_another_source_is_refused(
    docker: FakeDocker, targets: dict[str, Target]
) -> None:
    (docker.folder / "source").write_text("0" * 64)

    with pytest.raises(BuildFailed, match="holds another source"):
        build_image(request(docker, targets), quiet)
    # Nor is it taken for good the next time.
    with pytest.raises(BuildFailed, match="holds another source"):
        build_image(request(docker, targets), quiet)
    assert not any("|tag " in line for line in docker.log())


def test_a_failing_build_shows_the_end_of_its_log(
    docker: FakeDocker, targets: dict[str, Target]
) -> None:
    (docker.folder / "fail").write_text("#9 step\n" * 90 + "#9 ERROR: g++: out of luck\n")

    with pytest.raises(BuildFailed) as raised:
        build_image(request(docker, targets), quiet)
    assert "out of luck" in raised.value.why
    assert raised.value.why.count("\n") < 40
    assert raised.value.exit_code == ExitCode.BUILD_FAILED


def test_a_base_that_cannot_be_had(docker: FakeDocker, targets: dict[str, Target]) -> None:
    (docker.folder / "pull").write_text("Error response from daemon: dial tcp: no such host\n")

    with pytest.raises(BaseUnreachable, match=r"python:3\.11-slim-bookworm"):
        ensure_image(ROOT, targets["cpu"], docker.env, quiet)


def test_a_stale_dockerfile_is_not_built(
    docker: FakeDocker, targets: dict[str, Target], checkout: Path
) -> None:
    path = checkout / "images/cpu/Dockerfile"
    path.write_text(path.read_text() + "RUN true\n", encoding="utf-8")

    with pytest.raises(StaleGenerated):
        build_image(request(docker, targets, checkout), quiet)
    write(checkout, {Path("images/cpu/Dockerfile"): render_dockerfile(checkout, targets["cpu"])})
    build_image(request(docker, targets, checkout), quiet)


def test_an_unchanged_tree_builds_nothing_and_mends_its_aliases(
    docker: FakeDocker, targets: dict[str, Target]
) -> None:
    build_image(request(docker, targets), quiet)
    before = len(docker.log())
    said: list[str] = []

    facts = build_image(request(docker, targets), said.append)

    again = docker.log()[before:]
    assert facts.stand_in
    assert not any("|build " in line or "|run " in line for line in again)
    assert sum("|tag " in line for line in again) == 2  # the aliases
    assert any("is up to date" in line for line in said)


def test_no_cache_builds_what_is_there(docker: FakeDocker, targets: dict[str, Target]) -> None:
    build_image(request(docker, targets), quiet)

    build_image(dataclasses.replace(request(docker, targets), no_cache=True), quiet)

    assert sum("|build " in line for line in docker.log()) == 2


def test_unresolved_pins_are_said_and_refused_when_frozen(
    docker: FakeDocker, targets: dict[str, Target]
) -> None:
    said: list[str] = []
    assert targets["cpu"].unresolved

    build_image(request(docker, targets), said.append)
    assert any(line.startswith("unresolved pins: base, torch") for line in said)

    with pytest.raises(UnresolvedPins, match="base, torch") as raised:
        build_image(dataclasses.replace(request(docker, targets), frozen=True), quiet)
    assert raised.value.exit_code == ExitCode.UNRESOLVED_PINS
    assert "images lock cpu" in raised.value.next_step


def test_a_pinned_target_is_built_frozen(
    docker: FakeDocker, targets: dict[str, Target], checkout: Path
) -> None:
    cpu = targets["cpu"]
    pinned = dataclasses.replace(
        cpu,
        base=dataclasses.replace(cpu.base, digest="sha256:" + "ab" * 32),
        torch=dataclasses.replace(cpu.torch, sha256=("ab" * 32, "cd" * 32)),
    )
    write(checkout, {Path("images/cpu/Dockerfile"): render_dockerfile(checkout, pinned)})

    facts = build_image(
        BuildRequest(checkout, pinned, base="debian:test", frozen=True, env=docker.env), quiet
    )
    assert facts.stand_in


def jetson(docker: FakeDocker, targets: dict[str, Target]) -> BuildRequest:
    return BuildRequest(ROOT, targets["jetson"], base="debian:test", env=docker.env)


def test_another_architecture_is_built_for_by_emulation(
    docker: FakeDocker, targets: dict[str, Target]
) -> None:
    """The base that is here is for this machine, so the other one is pulled."""
    (docker.folder / "system").write_text("Docker Desktop\n")

    build_image(jetson(docker, targets), quiet)

    log = "\n".join(docker.log())
    assert "|pull --platform=linux/arm64 debian:test" in log
    assert re.search(r"\|build .*--platform linux/arm64 ", log)
    assert re.search(r"\|run .*--platform=linux/arm64 ", log)


def test_an_architecture_that_this_host_cannot_emulate(tmp_path: Path) -> None:
    with pytest.raises(ToolchainMissing, match="cannot run programs for arm64") as raised:
        require_emulation("arm64", tmp_path)
    assert "qemu-user-static" in raised.value.next_step

    (tmp_path / "proc/sys/fs/binfmt_misc").mkdir(parents=True)
    (tmp_path / "proc/sys/fs/binfmt_misc/qemu-aarch64").touch()
    require_emulation("arm64", tmp_path)


def test_a_foreign_program_that_could_not_start_is_named() -> None:
    error = translate(
        "standard_init_linux.go:228: exec user process caused: exec format error", "x"
    )

    assert isinstance(error, ToolchainMissing)
    assert "qemu-user-static" in error.next_step


MANIFEST = {"layers": [{"size": 2_000_000_000}, {"size": 500_000_000}]}


def test_what_a_pull_costs_is_said_before_it(
    docker: FakeDocker, targets: dict[str, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    (docker.folder / "manifest").write_text(json.dumps(MANIFEST))
    usage = shutil.disk_usage(docker.folder)._replace(free=50 * 10**9)
    monkeypatch.setattr("narrowgauge.images.base.shutil.disk_usage", lambda _: usage)
    said: list[str] = []

    build_image(BuildRequest(ROOT, targets["cpu"], env=docker.env), said.append)

    line = next(line for line in said if line.startswith("pulling"))
    assert "2.50 GB to download, 3 min at 100 Mbit/s" in line
    assert f"50 GB free in {docker.folder}" in line


def test_a_pull_that_would_not_fit_is_not_begun(
    docker: FakeDocker, targets: dict[str, Target]
) -> None:
    (docker.folder / "manifest").write_text(json.dumps({"layers": [{"size": 10**16}]}))

    with pytest.raises(DiskFull, match="no room for the base"):
        build_image(BuildRequest(ROOT, targets["cpu"], env=docker.env), quiet)
    assert not any("|pull " in line for line in docker.log())


def test_the_size_is_that_of_the_right_architecture(docker: FakeDocker) -> None:
    entries = [
        {"digest": "sha256:a", "platform": {"architecture": "amd64"}},
        {"digest": "sha256:b", "platform": {"architecture": "arm64"}},
    ]
    (docker.folder / "manifest").write_text(json.dumps({"manifests": entries}))
    client = find_client(None, docker.env)

    # The fake answers the second question with the list again, which has no layers.
    assert registry_size(client, "x/y:1", "linux/arm64") is None
    assert "|manifest inspect x/y@sha256:b" in docker.log()[-1]


def test_a_registry_that_says_nothing_is_said_too(
    docker: FakeDocker, targets: dict[str, Target]
) -> None:
    said: list[str] = []

    build_image(BuildRequest(ROOT, targets["cpu"], env=docker.env), said.append)

    assert any("does not say how large" in line for line in said)


def test_the_context_holds_what_the_dockerfile_reads_and_no_more(
    targets: dict[str, Target], tmp_path: Path
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "a-1-py3-none-any.whl").write_text("x")
    cpu = targets["cpu"]

    with make_context(BuildRequest(ROOT, cpu, wheels=wheels, env=own_cache(tmp_path))) as context:
        dockerfile = (context / "images/cpu/Dockerfile").read_text()
        copied = re.findall(r"^COPY (?!--from)(?:--\S+ )*(.*) \S+$", dockerfile, re.MULTILINE)
        mounted = re.findall(r"source=([^,]+)", dockerfile)
        for source in [*" ".join(copied).split(), *mounted]:
            assert (context / source).exists(), source
        assert (context / "docker/wheels/a-1-py3-none-any.whl").exists()
        names = {path.name for path in context.rglob("*")}
        assert not names & {"__pycache__", "build", ".git", "targets.toml"}
        assert not [name for name in names if name.endswith((".so", ".pyc"))]
        assert not (context / "src/narrowgauge").exists()
    assert not context.exists()


def test_the_plain_context_of_compose_lets_the_same_through(targets: dict[str, Target]) -> None:
    """`docker compose build` takes the checkout itself; .dockerignore must not hide a source."""
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    dockerfile = render_dockerfile(ROOT, targets["cpu"])
    copied = re.findall(r"^COPY (?!--from)(?:--\S+ )*(.*) \S+$", dockerfile, re.MULTILINE)
    for source in [*" ".join(copied).split(), *re.findall(r"source=([^,]+)", dockerfile)]:
        assert any(Path(source).match(pattern) for pattern in kept), source


def test_an_empty_wheel_folder_is_a_mistake(targets: dict[str, Target], tmp_path: Path) -> None:
    request = BuildRequest(ROOT, targets["cpu"], wheels=tmp_path, env=own_cache(tmp_path))

    with pytest.raises(UsageError, match="holds no wheel"), make_context(request):
        pass


def test_a_missing_source_is_named(targets: dict[str, Target], checkout: Path) -> None:
    os.remove(checkout / "docker/entrypoint.sh")

    with (
        pytest.raises(BuildFailed, match=r"entrypoint\.sh is missing"),
        make_context(BuildRequest(checkout, targets["cpu"], env=own_cache(checkout.parent))),
    ):
        pass


def test_a_full_disk_while_the_context_is_copied_is_named(
    targets: dict[str, Target], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """copytree gathers its errors into one that has no errno."""

    def full(source: Path, destination: Path, **options: object) -> None:
        reason = str(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(destination)))
        raise shutil.Error([(str(source), str(destination), reason)])

    monkeypatch.setattr("narrowgauge.images.build.shutil.copytree", full)
    request = BuildRequest(ROOT, targets["cpu"], env=own_cache(tmp_path))
    with pytest.raises(DiskFull), make_context(request):
        pass
