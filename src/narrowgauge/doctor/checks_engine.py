"""The Docker engine: whether it answers, gives containers the GPU, and is not open to all."""

from __future__ import annotations

import shlex

from narrowgauge.doctor.findings import Check, Finding, error, note, ok, skipped, warning
from narrowgauge.doctor.situation import Engine, Problem, Situation
from narrowgauge.errors import ExitCode
from narrowgauge.executors.docker_errors import LEAST_API, TOOLKIT
from narrowgauge.selection import choose_accelerator
from narrowgauge.targets import Accelerator

__all__ = ["CHECKS"]

_NO_ENGINE = "no engine to ask"
_ASK_AGAIN = "ask again when the host is quieter: {} must answer"
_WORLD_WRITES = 0o002
_GIB = 1 << 30
#: Less than this for a native run's processes, and loading torch with a data set may be too much.
_LEAST_LIMIT = 4 * _GIB


def _engine(at: Situation) -> Finding:
    if isinstance(at.engine, Engine):
        return ok(f"Docker {at.engine.facts.version} at {at.engine.address}")
    if at.engine.code is ExitCode.DOCKER_TOO_OLD:
        return ok("an engine answers")
    if at.engine.late:  # slow, or dead: which, nobody knows, and a restart would end containers
        return warning(at.engine.text(), _ASK_AGAIN.format("docker info"))
    remedy = at.engine.next_step or "docker info must answer; or --executor native"
    return error(at.engine.text(), remedy)


def _engine_api(at: Situation) -> Finding:
    if isinstance(at.engine, Engine):
        return ok(f"API {at.engine.api}, at least {LEAST_API} is needed")
    if at.engine.code is ExitCode.DOCKER_TOO_OLD:
        return error(at.engine.text(), at.engine.next_step)
    return skipped(_NO_ENGINE)


def _client(at: Situation) -> Finding:
    if isinstance(at.build_tool, Problem):
        if at.build_tool.late:
            return warning(at.build_tool.text(), _ASK_AGAIN.format("docker buildx version"))
        remedy = at.build_tool.next_step or "docker buildx version should answer at once"
        if isinstance(at.engine, Engine) and at.engine.has_image:
            return warning(f"{at.build_tool.text()}; the image is here already", remedy)
        return error(at.build_tool.text(), remedy)
    how = "buildx" if at.build_tool.buildx else "the engine's own BuildKit"
    return ok(f"{at.build_tool.executable} builds with {how}")


def _gpu_runtime(at: Situation) -> Finding:
    if at.target is None or not at.target.fits.needs_gpu:
        return skipped("the target uses no GPU" if at.target else "no target")
    if isinstance(at.engine, Problem):
        return skipped(_NO_ENGINE)
    facts = at.engine.facts
    way = choose_accelerator(at.target, facts.runtimes, facts.cdi)
    if "nvidia" in facts.runtimes or way is Accelerator.CDI:
        return ok(f"containers get the GPU by {way.value}")
    if at.engine.hook and way is Accelerator.DEVICE_REQUEST:
        return ok("containers get the GPU by device-request: its hook is installed")
    return error("this engine has no NVIDIA runtime" + _cdi_besides(at.engine), TOOLKIT)


def _cdi_besides(engine: Engine) -> str:
    return "; its CDI devices are not how this target is given the GPU" if engine.facts.cdi else ""


def _default_runtime(at: Situation) -> Finding:
    if at.host.l4t is None:
        return skipped("not a Jetson")
    if isinstance(at.engine, Problem):
        return skipped(_NO_ENGINE)
    if at.engine.default_runtime == "nvidia":
        return ok("nvidia")
    return warning(
        f"the default runtime is {at.engine.default_runtime or 'not known'}, not nvidia",
        "sudo nvidia-ctk runtime configure --runtime=docker --set-as-default"
        " && sudo systemctl restart docker",
    )


def _docker_group(at: Situation) -> Finding:
    if isinstance(at.engine, Problem) and at.engine.code is ExitCode.DOCKER_PERMISSION:
        return error("you may not talk to the engine", at.engine.next_step)
    if at.user.uid == 0:
        return ok("root needs no group")
    if at.docker_group:
        return ok("you are in the group docker, which is as good as root on this host")
    if isinstance(at.engine, Problem):
        return skipped(_NO_ENGINE)
    return ok("not in the group docker, and the engine answers all the same")


def _socket(at: Situation) -> Finding:
    address, mode = at.socket.address, at.socket.mode
    if address.startswith(("tcp://", "http://")) and not at.socket.tls:
        return warning(
            f"the engine is reached at {address} without TLS: whoever reaches it is root there",
            "close the port (the engine's -H, or hosts in /etc/docker/daemon.json), and use its"
            " socket: unset DOCKER_HOST, docker context use default",
        )
    if address.startswith("ssh://"):
        return skipped("an engine of another host")
    if mode is None and address.startswith("unix://"):
        return skipped(f"{address} is not there, or not for you to see")
    if mode is not None and mode & _WORLD_WRITES:
        path = address.removeprefix("unix://")
        return warning(
            f"every user of this host may write to {path} ({mode:04o}), and so become root",
            f"sudo chmod 660 {shlex.quote(path)};"
            " whoever runs experiments goes into the group docker",
        )
    return ok(f"{address} is not open to everybody")


def _rootless(at: Situation) -> Finding:
    # unverified: a rootless or remapping engine writes no results | none was at hand | try mnist
    if isinstance(at.engine, Problem):
        return skipped(_NO_ENGINE)
    if at.engine.remaps:
        return warning(
            "the engine remaps users (userns-remap): user numbers in a container are others on the"
            " host, so a run may not write its results",
            'take "userns-remap" out of /etc/docker/daemon.json and, when no container runs,'
            " sudo systemctl restart docker; or --executor native",
        )
    if not at.engine.rootless:
        return ok("the engine runs as root and keeps users' numbers as they are")
    return warning(
        "the engine is rootless: user numbers in a container are others on the host,"
        " so a run may not write its results",
        "use the host's own engine: docker context use default; or --executor native",
    )


def _cgroup_memory(at: Situation) -> Finding:
    limit = at.memory.limit
    if limit is not None and limit < _LEAST_LIMIT:
        return warning(
            f"this shell's processes may take {limit / _GIB:.1f} GiB of memory in all",
            "raise memory.max of its control group (or MemoryMax of its systemd unit)",
        )
    if isinstance(at.engine, Problem):
        return skipped(_NO_ENGINE)
    missing = [] if at.engine.limits_memory else ["memory"]
    missing += [] if at.engine.limits_swap else ["swap"]
    if missing:
        return note(
            f"the engine cannot limit {' and '.join(missing)}",
            "add cgroup_enable=memory swapaccount=1 to the kernel's command line",
        )
    return ok("the engine can limit memory, and no limit is in the way here")


CHECKS = (
    Check(
        "engine",
        "a Docker engine answers",
        "Every run in a container needs it, and a record names its version.",
        "Install Docker (apt-get install docker.io), start it (sudo systemctl start docker), or "
        "run natively: --executor native.",
        _engine,
    ),
    Check(
        "engine-api",
        f"the engine speaks API {LEAST_API} (Docker 20.10) or newer",
        "Older engines lack what the Dockerfiles use of BuildKit, and the oldest lack --gpus. CDI "
        "needs Docker 25, and has to be switched on before Docker 28.",
        "Update Docker.",
        _engine_api,
    ),
    Check(
        "client",
        "a docker command is here that builds with BuildKit",
        "Images are built by the docker command, since Docker's Python SDK has no BuildKit. "
        "Commands of version 23 and later need buildx for it.",
        "apt-get install docker-buildx (or docker-buildx-plugin); or build elsewhere, and bring "
        "the image with narrowgauge images save and load.",
        _client,
    ),
    Check(
        "gpu-runtime",
        "the engine can give a container the GPU in the way the target is given it",
        "Without the NVIDIA Container Toolkit a container with --gpus is refused. On a Jetson only "
        "the NVIDIA runtime works: without it torch sees no GPU, and says nothing of why.",
        f"{TOOLKIT[0].upper()}{TOOLKIT[1:]}.",
        _gpu_runtime,
    ),
    Check(
        "default-runtime",
        "on a Jetson, nvidia is the engine's default runtime",
        "Narrowgauge asks for the runtime by name. Whatever starts containers without naming it, "
        "other tools and plain docker run, silently has no GPU.",
        "sudo nvidia-ctk runtime configure --runtime=docker --set-as-default, then restart Docker.",
        _default_runtime,
    ),
    Check(
        "docker-group",
        "you may talk to the engine",
        "Who may talk to the engine may do everything on the host; so it is a group's right.",
        "sudo usermod -aG docker $USER, then log in again.",
        _docker_group,
    ),
    Check(
        "socket",
        "the engine is not open to everybody",
        "A tcp port without TLS gives root to the network, and a socket that all may write gives "
        "it to every user. Others' containers also disturb a measurement.",
        "Close the port, and use the engine's own socket, at mode 660. Runs mount folders of this "
        "host, so for another machine's engine start narrowgauge there.",
        _socket,
    ),
    Check(
        "rootless",
        "the engine keeps users' numbers",
        "A run's container has your user and group number, so that results belong to you. In a "
        "rootless engine, and in one with userns-remap, these numbers are others on the host.",
        "Use the host's own engine for runs, without userns-remap.",
        _rootless,
    ),
    Check(
        "cgroup-memory",
        "no control group is in the way, and the engine can limit memory",
        "A run killed by a limit of the shell it was started from looks like one that needs too "
        "much memory.",
        "Raise the limit, or start runs from a shell without one.",
        _cgroup_memory,
    ),
)
