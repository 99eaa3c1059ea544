"""`narrowgauge images …`: render, build and lock."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.cli.options import Project, checkout_of

if TYPE_CHECKING:
    from narrowgauge.targets import Target

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the `images` commands to the program."""
    images = typer.Typer(no_args_is_help=True, help="Render, build and pin the images.")
    images.command("render")(render)
    images.command("build")(build)
    images.command("lock")(lock)
    app.add_typer(images, name="images")


def render(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail where a file is out of date.")
    ] = False,
    project: Project = None,
) -> None:
    """Render the Dockerfiles and compose.yaml from docker/."""
    from narrowgauge.images import render as rendering

    root, targets = _checkout(project)
    files = rendering.render_all(root, targets)
    if check:
        rendering.check(root, files)
        print(f"{len(files)} generated files are up to date")
        return
    for path in rendering.write(root, files):
        print(f"wrote {path}")


def build(
    target: Annotated[str, typer.Argument(help="Which target's image.")],
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="IMAGE", help="Build on this stand-in (tests only)."),
    ] = None,
    wheels: Annotated[
        Path | None,
        typer.Option("--wheels", metavar="DIR", help="Take every package from here, ask no index."),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Build every layer anew.")] = False,
    project: Project = None,
) -> None:
    """Build, verify and alias the image of TARGET."""
    from narrowgauge.images.build import BuildRequest, build_image
    from narrowgauge.targets import target_named

    root, targets = _checkout(project)
    chosen = target_named(targets, target)
    request = BuildRequest(root, chosen, base, wheels, no_cache, env=dict(os.environ))
    facts = build_image(request, say=lambda line: print(line, file=sys.stderr))
    suffix = " (stand-in base: its records are never REPRODUCED)" if facts.stand_in else ""
    print(f"{facts.name} = {chosen.alias}{suffix}")


def lock(
    target: Annotated[str | None, typer.Argument(help="Which target; all by default.")] = None,
    packages: Annotated[
        bool, typer.Option("--packages", help="Pin packages too, not only the base.")
    ] = False,
    project: Project = None,
) -> None:
    """Ask registry and index what to pin, and write it. Needs the network."""
    from narrowgauge.errors import NarrowgaugeError
    from narrowgauge.targets import target_named

    root, targets = _checkout(project)
    chosen = list(targets.values()) if target is None else [target_named(targets, target)]
    failure: NarrowgaugeError | None = None
    for each in chosen:
        if packages and each.packages:
            _lock_packages(root, each)
        try:
            _lock_base(root, each)
        except NarrowgaugeError as error:
            print(f"{each.name}: digest stays as it is; {error.what}", file=sys.stderr)
            failure = error
    if failure is not None:
        raise failure


def _lock_base(root: Path, target: Target) -> None:
    from narrowgauge.images.client import find_client
    from narrowgauge.images.lock import pin_base, resolve_digest
    from narrowgauge.targets import TARGETS_FILE, Builder

    digest = resolve_digest(find_client(Builder.BUILDX, dict(os.environ)), target)
    path = root / TARGETS_FILE
    path.write_text(pin_base(path.read_text(encoding="utf-8"), target.name, digest), "utf-8")
    print(f"{target.name}: {target.base.repository}:{target.base.tag} is {digest}")


def _lock_packages(root: Path, target: Target) -> None:
    from narrowgauge.images.content import STANDIN_LOCK, lock_path
    from narrowgauge.images.lock import lock_text, pin_packages

    pins = pin_packages(target)
    (root / lock_path(target, standin=False)).write_text(lock_text(target, pins), "utf-8")
    if target.name == "cpu":
        note = "For a stand-in base: Debian 12 with its own Python. Tests only."
        (root / STANDIN_LOCK).write_text(lock_text(target, pins, note), "utf-8")
    print(f"{target.name}: {len(pins)} packages pinned")


def _checkout(project: Path | None) -> tuple[Path, dict[str, Target]]:
    from narrowgauge.targets import load_targets

    checkout = checkout_of(project)
    return checkout.root, load_targets(checkout.targets_file)
