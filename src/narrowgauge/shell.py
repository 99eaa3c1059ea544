"""`narrowgauge shell`: a look around where experiments run. Replaces this process."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from narrowgauge.container import docker_run_words
from narrowgauge.errors import NotApplicableError, ToolchainMissing, UnknownNameError
from narrowgauge.executors.native import lab_environment
from narrowgauge.launch import EXECUTORS, NO_IMAGE, World, image_finder
from narrowgauge.plan import Places, cache_volume, plan_shell
from narrowgauge.selection import choose_accelerator, pick_target
from narrowgauge.targets import load_targets

__all__ = ["open_shell"]


def open_shell(
    world: World,
    words: tuple[str, ...],
    *,
    on: str | None,
    executor: str,
    data: Path,
    lab_python: Path | None,
) -> None:
    """Become the shell (or `words`). Returns never; raises what keeps it from starting."""
    if executor not in EXECUTORS:
        raise UnknownNameError("executor", executor, EXECUTORS)
    if executor != "native":
        try:
            _exec(docker_words(world, words, on=on, data=data), dict(world.env))
        except (*NO_IMAGE, NotApplicableError) as error:
            if executor == "docker" or on is not None:
                raise
            world.say(f"native: {error.what}")
    native_words, env = native_shell(world, words, lab_python)
    _exec(native_words, env)


def docker_words(
    world: World, words: tuple[str, ...], *, on: str | None, data: Path
) -> tuple[str, ...]:
    """The `docker run` command of an interactive container like a run's, with an empty /out."""
    from narrowgauge.executors.docker import DockerExecutor
    from narrowgauge.executors.docker_client import connect, require_architecture

    target = pick_target(load_targets(world.checkout.targets_file), world.host, on)
    client = connect(world.env)
    image = image_finder(world, client, target)()
    require_architecture(client, image.name)
    facts = DockerExecutor(client, needs_accelerator=target.fits.needs_gpu).probe()
    folder = Path(tempfile.mkdtemp(prefix="narrowgauge-shell-"))
    places = Places(folder, world.checkout.experiments, data if data.is_dir() else None)
    places.out.mkdir()
    world.say(f"{image.name}; /out is {places.out}")
    plan = plan_shell(
        target,
        words=words,
        image=image.name,
        cache=cache_volume(target.name, image.content_tag or image.digest, world.user.uid),
        places=places,
        user=world.user,
        accelerator=choose_accelerator(target, facts.runtimes, facts.cdi),
    )
    terminal = ("--tty",) if sys.stdin.isatty() else ()
    return docker_run_words(plan, ("--rm", "--interactive", *terminal))


def native_shell(
    world: World, words: tuple[str, ...], lab_python: Path | None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The user's own shell, with the lab's Python first on the path and our source importable."""
    from narrowgauge.environment import ensure_lab_python

    python = ensure_lab_python(world.checkout, world.host, world.env, world.say, lab_python)
    env = lab_environment(world.env, world.checkout.source)
    env["PATH"] = os.pathsep.join([str(python.parent), env.get("PATH", os.defpath)])
    return words or (world.env.get("SHELL", "/bin/sh"),), env


def _exec(words: tuple[str, ...], env: dict[str, str]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(words[0], list(words), env)
    except OSError as error:
        raise ToolchainMissing(
            f"cannot start {words[0]}", why=error.strerror or str(error)
        ) from error
