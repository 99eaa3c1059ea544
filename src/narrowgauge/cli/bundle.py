"""`narrowgauge bundle`, `verify-bundle`. Thin: each calls the module that does it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.cli import complete
from narrowgauge.cli.options import Json, Project, Results, checkout_of, note, results_root
from narrowgauge.terminal import plain

if TYPE_CHECKING:
    from narrowgauge.bundle.assemble import Made
    from narrowgauge.bundle.verify import Verification
    from narrowgauge.images.client import BuildClient

__all__ = ["register"]

_NOT_TO_BE_USED = "copy or download it again; do not use what it says"


def register(app: typer.Typer) -> None:
    """Add these commands to the program."""
    app.command("bundle")(bundle)
    app.command("verify-bundle")(verify_bundle)


def bundle(
    run: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Which runs; every recorded one by default.",
            autocompletion=complete.runs,
        ),
    ] = None,
    public: Annotated[
        bool,
        typer.Option("--public", help="Leave out what may not be passed on, and say so (default)."),
    ] = False,
    full: Annotated[
        bool,
        typer.Option("--full", help="With every image, NVIDIA's layers too: for your own archive."),
    ] = False,
    images: Annotated[
        bool, typer.Option("--images/--no-images", help="Put images into it as files.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="narrowgauge-public.zip, or -full, here."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    results: Results = None,
    project: Project = None,
    as_json: Json = False,
) -> None:
    """Put runs, sources, locks, images and verdicts into one sealed file that others can check."""
    from narrowgauge.bundle.assemble import BundleRequest, make_bundle
    from narrowgauge.bundle.runs import stored_runs
    from narrowgauge.errors import UsageError
    from narrowgauge.machine import machine_facts
    from narrowgauge.store import Store

    if public and full:
        raise UsageError("--public and --full do not go together")
    kind = "full" if full else "public"
    checkout = checkout_of(project)
    store = Store(results_root(results, checkout))
    request = BundleRequest(
        checkout=checkout,
        results=store.root,
        stored=stored_runs(store, run or ()),
        kind=kind,
        out=out or Path(f"narrowgauge-{kind}.zip"),
        machine=machine_facts(),
        now=time.time(),
        client=_client if images else None,
        force=force,
    )
    made = make_bundle(request, note)
    print(_made_json(made) if as_json else _made_text(made))


def verify_bundle(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A bundle, or the folder it was unpacked to.")
    ],
    sha256: Annotated[
        str | None,
        typer.Option("--sha256", metavar="HASH", help="What its authors say the file's hash is."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a bundle, offline: every byte, its records, its verdicts. Exit 21 where it differs."""
    from narrowgauge.bundle import verify
    from narrowgauge.errors import BundleDamaged

    try:
        found = verify.verify_bundle(file, wanted=sha256)
    except BundleDamaged as damaged:
        if not damaged.next_step:
            # What it found speaks of a part; which file it is of, and what to do, is said here.
            damaged.what = f"{file} is not the bundle that was made: {damaged.what}"
            damaged.next_step = _NOT_TO_BE_USED
        raise
    print(_found_json(found) if as_json else _found_text(found))
    if not found.whole:
        raise BundleDamaged(
            f"{file} is not the bundle that was made",
            why="\n".join(found.problems[:20]),
            next_step=_NOT_TO_BE_USED,
        )


def _client() -> BuildClient:
    from narrowgauge.images.client import find_client

    return find_client(None, dict(os.environ))


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _wrong(number: int) -> str:
    return f"{_counted(number, 'thing')} {'are' if number != 1 else 'is'} wrong"


def _made_text(made: Made) -> str:
    manifest = made.manifest
    lines = [
        f"{made.path}: {made.files} files, {made.bytes / 1e6:.1f} MB,"
        f" {_counted(len(manifest.runs), 'run')}",
        f"sha256 {made.sha256}",
    ]
    if manifest.left_out:
        lines += ["left out:"]
        lines += [f"  {plain(left.what)}: {plain(left.why)}" for left in manifest.left_out]
    lines.append(f"check it anywhere, offline: narrowgauge verify-bundle {made.path}")
    return "\n".join(lines)


def _made_json(made: Made) -> str:
    from narrowgauge_contract.codec import encode

    body = {
        "path": str(made.path),
        "sha256": made.sha256,
        "bytes": made.bytes,
        "files": made.files,
        "manifest": encode(made.manifest),
    }
    return json.dumps(body, indent=2, sort_keys=True)


def _found_text(found: Verification) -> str:
    runs = _counted(found.runs, "run")
    lines = [f"{found.path}: {found.files} files, {found.bytes / 1e6:.1f} MB, {runs}"]
    if found.sha256:
        lines.append(f"sha256 {found.sha256}")
    if found.manifest is not None:
        kind = found.manifest.kind
        left = _counted(len(found.manifest.left_out), "thing")
        lines.append(f"a {plain(kind)} bundle, {left} left out")
    lines.append(f"{_counted(found.verdicts, 'verdict')} had again from the records")
    lines += [f"note: {plain(each)}" for each in found.notes]
    lines.append("whole" if found.whole else _wrong(len(found.problems)))
    return "\n".join(lines)


def _found_json(found: Verification) -> str:
    from narrowgauge_contract.codec import encode

    return json.dumps(
        {
            "path": str(found.path),
            "sha256": found.sha256,
            "files": found.files,
            "bytes": found.bytes,
            "runs": found.runs,
            "verdicts": found.verdicts,
            "whole": found.whole,
            "problems": list(found.problems),
            "notes": list(found.notes),
            "manifest": encode(found.manifest),
        },
        indent=2,
        sort_keys=True,
    )
