"""`narrowgauge images …`: render, build and lock."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.cli.options import Project, checkout_of

if TYPE_CHECKING:
    from narrowgauge.images.client import BuildClient
    from narrowgauge.targets import Target
    from narrowgauge_contract.record import ImageFacts

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the `images` commands to the program."""
    images = typer.Typer(no_args_is_help=True, help="Render, build and pin the images.")
    images.command("render")(render)
    images.command("build")(build)
    images.command("verify")(verify)
    images.command("save")(save)
    images.command("load")(load)
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
    frozen: Annotated[
        bool, typer.Option("--frozen", help="Refuse where a pin is unresolved.")
    ] = False,
    project: Project = None,
) -> None:
    """Build, verify and alias the image of TARGET; for another architecture by emulation."""
    from narrowgauge.images.build import BuildRequest, build_image
    from narrowgauge.targets import target_named

    root, targets = _checkout(project)
    chosen = target_named(targets, target)
    request = BuildRequest(root, chosen, base, wheels, no_cache, frozen, env=dict(os.environ))
    facts = build_image(request, say=_note)
    suffix = " (stand-in base: its records are never REPRODUCED)" if facts.stand_in else ""
    print(f"{facts.name} = {chosen.alias}{suffix}")


def verify(
    target: Annotated[str, typer.Argument(help="Which target's image.")], project: Project = None
) -> None:
    """Run the check of TARGET's image inside it: packages, kernels, and the source it holds."""
    from narrowgauge.images.base import build_platform
    from narrowgauge.images.build import verify_image
    from narrowgauge.images.client import find_client
    from narrowgauge.images.content import source_hash
    from narrowgauge.targets import target_named

    root, targets = _checkout(project)
    chosen = target_named(targets, target)
    client = find_client(chosen.builder, dict(os.environ))
    name = _built(client, root, chosen).name
    verify_image(client, name, build_platform(client, chosen), source_hash(root), print)


def save(
    target: Annotated[str, typer.Argument(help="Which target's image.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The archive to write.")],
    project: Project = None,
) -> None:
    """Write TARGET's image to a file, with a manifest beside it: FILE.json."""
    from narrowgauge.images.archive import manifest_path, save_archive
    from narrowgauge.images.client import find_client
    from narrowgauge.targets import target_named

    root, targets = _checkout(project)
    chosen = target_named(targets, target)
    client = find_client(chosen.builder, dict(os.environ))
    archive = save_archive(client, _built(client, root, chosen).name, out, _note)
    print(f"{out}: {archive.image}, {archive.bytes / 1e9:.2f} GB, sha256 {archive.sha256}")
    print(f"take {manifest_path(out).name} along; then: narrowgauge images load {out.name}")


def load(
    file: Annotated[Path, typer.Argument(help="An archive that `images save` wrote.")],
    project: Project = None,
) -> None:
    """Check an archive against its manifest and load it; what the checkout needs is said."""
    from narrowgauge.images.archive import load_archive
    from narrowgauge.images.client import find_client
    from narrowgauge.images.content import content_tag
    from narrowgauge.targets import target_named

    root, targets = _checkout(project)
    client = find_client(None, dict(os.environ))
    archive = load_archive(client, file, _note)
    chosen = target_named(targets, archive.target)
    client.tag(archive.image, chosen.alias)
    print(f"{archive.image} = {chosen.alias}")
    if not archive.stand_in and archive.content != content_tag(root, chosen):
        _note("this checkout has changed since: `narrowgauge run` will build the image anew")


def _built(client: BuildClient, root: Path, target: Target) -> ImageFacts:
    """The image that this checkout's runs would take. Raises UsageError where there is none."""
    from narrowgauge.errors import UsageError
    from narrowgauge.images.inspect import find_image

    found = find_image(client.inspect, root, target)
    if found is None:
        raise UsageError(
            f"the image of '{target.name}' is not built for what this checkout holds now",
            next_step=f"narrowgauge images build {target.name}",
        )
    return found


def lock(
    target: Annotated[str | None, typer.Argument(help="Which target; all by default.")] = None,
    packages: Annotated[
        bool, typer.Option("--packages", help="Resolve the lock files anew, too.")
    ] = False,
    project: Project = None,
) -> None:
    """Ask registry and indexes what to pin, and write it. Needs the network."""
    from narrowgauge.errors import NarrowgaugeError
    from narrowgauge.targets import target_named

    root, targets = _checkout(project)
    chosen = list(targets.values()) if target is None else [target_named(targets, target)]
    steps = (_lock_base, _lock_torch, *((_lock_packages,) if packages else ()))
    failure: NarrowgaugeError | None = None
    for each in chosen:
        for step in steps:
            try:
                step(root, each)
            except NarrowgaugeError as error:
                print(f"{each.name}: stays as it is; {error.what}", file=sys.stderr)
                failure = error
    if failure is not None:
        raise failure


def _lock_base(root: Path, target: Target) -> None:
    from narrowgauge.images.client import find_client
    from narrowgauge.images.lock import pin_base, resolve_digest
    from narrowgauge.targets import Builder

    digest = resolve_digest(find_client(Builder.BUILDX, dict(os.environ)), target)
    _rewrite(root, lambda text: pin_base(text, target.name, digest))
    print(f"{target.name}: {target.base.repository}:{target.base.tag} is {digest}")


def _lock_torch(root: Path, target: Target) -> None:
    from narrowgauge.images.lock import pin_torch, resolve_torch

    hashes = resolve_torch(target)
    if hashes:
        _rewrite(root, lambda text: pin_torch(text, target.name, hashes))
        print(f"{target.name}: torch {target.torch.version} pinned by sha256")


def _lock_packages(root: Path, target: Target) -> None:
    from narrowgauge.images.content import lock_path, notebook_lock_path
    from narrowgauge.images.lock import lock_text, pin_packages

    for path, packages in (
        (lock_path(target), target.packages),
        (notebook_lock_path(target), target.notebook),
    ):
        if packages:
            pins = pin_packages(target, packages)
            (root / path).write_text(lock_text(target, packages, pins), "utf-8")
            print(f"{path}: {len(pins)} packages pinned")


def _rewrite(root: Path, change: Callable[[str], str]) -> None:
    from narrowgauge.targets import TARGETS_FILE

    path = root / TARGETS_FILE
    path.write_text(change(path.read_text(encoding="utf-8")), "utf-8")


def _note(line: str) -> None:
    print(line, file=sys.stderr)


def _checkout(project: Path | None) -> tuple[Path, dict[str, Target]]:
    from narrowgauge.targets import load_targets

    checkout = checkout_of(project)
    return checkout.root, load_targets(checkout.targets_file)
