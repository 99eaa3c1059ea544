"""`narrowgauge notebook`: an experiment as a notebook, and JupyterLab where experiments run.

The server is a container as hardened as a run's, except that it has a port on this host's loopback
and a network of its own for that, which leads nowhere, and may write all results. It lives as long
as the command.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.catalog import load_experiment, load_experiments
from narrowgauge.container import LABEL_NOTEBOOK, ContainerPlan, create_body
from narrowgauge.errors import BadValueError, Busy, RunFailed
from narrowgauge.launch import World, image_finder
from narrowgauge.notebook import is_untouched, notebook_of, notebook_text
from narrowgauge.plan import NotebookServer, cache_volume, plan_notebook
from narrowgauge.runner import StopRequest, check_results, check_results_early, stop_signals
from narrowgauge.selection import choose_accelerator, pick_target
from narrowgauge.targets import load_targets
from narrowgauge_contract.codec import write_atomic
from narrowgauge_contract.spec import ExperimentSpec

if TYPE_CHECKING:
    import docker

__all__ = ["NOTEBOOKS", "open_notebook", "place_notebook", "serve", "write_notebook"]

#: The folder of notebooks, in that of results, which is all that JupyterLab sees.
NOTEBOOKS = "notebooks"
_PATIENCE_S = 120.0
_POLL_S = 0.2
#: JupyterLab asks back on the first signal; with the kernels gone nothing is lost by being quick.
_STOP_S = 5
_LOG_LINES = 40


def write_notebook(world: World, experiment: str, path: Path) -> None:
    """Write the experiment's notebook to `path`. Raises UnknownNameError, BadValueError where the
    file is there: it may hold somebody's work."""
    spec = load_experiment(world.checkout.experiments, experiment)
    if path.exists():
        raise BadValueError(
            f"{path} is there already", next_step="remove it, or give --write another name"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8") as stream:
            stream.write(_text(world, spec))
    except OSError as error:
        raise BadValueError(f"cannot write {path}", why=error.strerror or str(error)) from error


def place_notebook(world: World, spec: ExperimentSpec, results: Path) -> str:
    """Put the experiment's notebook below the results; its path there.

    One that somebody has worked in, or run, stays as it is; else it follows the declaration.
    """
    place = f"{NOTEBOOKS}/{spec.id}.ipynb"
    path, text = results / place, _text(world, spec)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
    if found is None or (found != text and is_untouched(found)):
        write_atomic(path, text.encode("utf-8"))
    elif found != text:
        world.say(
            f"{path} was changed or run, and stays; a fresh one: narrowgauge notebook --write FILE"
        )
    return place


def open_notebook(
    world: World, *, experiment: str | None, on: str | None, port: int, results: Path, data: Path
) -> None:
    """Start JupyterLab, say where it is, and stay until Ctrl-C or its own end; then remove it.

    Raises what keeps an image or a container from being had, Busy where the port is taken, and
    RunFailed where JupyterLab ends by itself with an error.
    """
    from narrowgauge.executors.docker import DockerExecutor
    from narrowgauge.executors.docker_client import connect, require_architecture
    from narrowgauge.images.notebook import ensure_notebook_image

    folder = world.checkout.experiments
    named = [load_experiment(folder, experiment)] if experiment else load_experiments(folder)
    target = pick_target(load_targets(world.checkout.targets_file), world.host, on)
    check_results_early(results)
    _require_free(port)
    client = connect(world.env)
    image = image_finder(world, client, target)()
    require_architecture(client, image.name)
    facts = DockerExecutor(client, needs_accelerator=target.fits.needs_gpu).probe()
    name = ensure_notebook_image(world.checkout.root, target, image, world.env, world.say)
    check_results(results)
    places = [place_notebook(world, spec, results) for spec in named]
    server = NotebookServer(port, secrets.token_hex(24))
    plan = plan_notebook(
        target,
        name=f"narrowgauge-notebook-{secrets.token_hex(4)}",
        image=name,
        cache=cache_volume(target.name, image.content_tag or image.digest, world.user.uid),
        results=results,
        experiments=folder,
        data=data if data.is_dir() else None,
        user=world.user,
        accelerator=choose_accelerator(target, facts.runtimes, facts.cdi),
        server=server,
    )
    serve(client, plan, server, world.say, places[0] if experiment else "")


def serve(
    client: docker.APIClient,
    plan: ContainerPlan,
    server: NotebookServer,
    say: Callable[[str], None],
    path: str,
    patience_s: float = _PATIENCE_S,
) -> None:
    """Run the container until a signal or its own end. Nothing of it is left, however this ends."""
    stop = StopRequest()
    with stop_signals(stop), _started(client, plan) as container:
        deadline = time.monotonic() + patience_s
        told = False
        while not stop.requested:
            state = client.inspect_container(container)["State"]
            if not state["Running"]:
                _raise_if_failed(client, container, state)
                say("JupyterLab has ended")
                return
            if not told and _answers(server):
                told = True
                say("JupyterLab runs here; Ctrl-C ends it:")
                print(server.url(path), flush=True)
            elif not told and time.monotonic() > deadline:
                raise RunFailed(
                    f"JupyterLab does not answer after {patience_s:.0f} s",
                    why=_log(client, container),
                )
            time.sleep(_POLL_S)
        say("ending JupyterLab")


@contextlib.contextmanager
def _started(client: docker.APIClient, plan: ContainerPlan) -> Iterator[str]:
    """The container and its network, for the block."""
    from docker.errors import NotFound

    from narrowgauge.executors.docker_client import ask

    # What comes from outside is let in; without masquerade, what goes out gets no answer.
    options = {"com.docker.network.bridge.enable_ip_masquerade": "false"}
    labels = {LABEL_NOTEBOOK: plan.name}
    ask(
        client,
        lambda: client.create_network(
            plan.network, driver="bridge", options=options, labels=labels, check_duplicate=True
        ),
    )
    container = ""
    try:
        body = create_body(plan)
        made = ask(
            client,
            lambda: client.create_container_from_config(  # type: ignore[no-untyped-call]
                body, name=plan.name
            ),
        )
        container = made["Id"]
        ask(client, lambda: client.start(container))
        yield container
    finally:
        try:
            if container:
                _remove(client, container)
        finally:
            with contextlib.suppress(NotFound):
                client.remove_network(plan.network)


def _remove(client: docker.APIClient, container: str) -> None:
    """Stop it, and remove it whatever came of that. That somebody else did so is no error."""
    from docker.errors import NotFound

    try:
        with contextlib.suppress(NotFound):
            client.stop(container, timeout=_STOP_S)
    finally:
        with contextlib.suppress(NotFound):
            client.remove_container(container, force=True)


def _raise_if_failed(client: docker.APIClient, container: str, state: dict[str, Any]) -> None:
    code = int(state["ExitCode"])
    if code != 0:
        raise RunFailed(f"JupyterLab ended with exit code {code}", why=_log(client, container))


def _log(client: docker.APIClient, container: str) -> str:
    return str(client.logs(container, tail=_LOG_LINES).decode("utf-8", "replace")).strip()


def _answers(server: NotebookServer) -> bool:
    """Whether the server is up and takes its token."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/api/contents",
        headers={"Authorization": f"token {server.token}"},
    )
    # No proxy: it would be asked for this host, and could only be wrong.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _require_free(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise Busy(
                f"port {port} of this host is taken",
                why=error.strerror or str(error),
                next_step=f"another one: --port {port + 1}",
            ) from error


def _text(world: World, spec: ExperimentSpec) -> str:
    page = world.checkout.experiments / spec.id / "README.md"
    readme = page.read_text(encoding="utf-8") if page.is_file() else ""
    return notebook_text(notebook_of(spec, readme))
