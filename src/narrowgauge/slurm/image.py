"""The image on a cluster without Docker: the archive of `images save`, converted for what is there.

Apptainer makes a .sif of the archive; enroot reads no archives, so its .sqsh is made where Docker
is. What was converted is told in a note beside it, with the digests of both.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.errors import BuildFailed, DataCorrupt, ToolchainMissing, UsageError
from narrowgauge.images.archive import Archive, manifest_path
from narrowgauge.plan import Places, lab_arguments
from narrowgauge_contract.codec import decode, read_json, write_json_atomic
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_contract.record import ImageFacts

__all__ = ["Converted", "container_command", "convert", "pick_tool"]

Say = Callable[[str], None]
#: 1: first.
NOTE_FORMAT = 1
_SUFFIX = {"apptainer": ".sif", "enroot": ".sqsh"}


@dataclass(frozen=True)
class Converted:
    """An image that the site's tool can start, and what it was made of. Its note is this, as JSON.

    `archive_sha256` is the file's that `images save` wrote, `digest` the image's id in it.
    """

    format: int
    tool: str
    tool_version: str
    file: str
    sha256: str
    image: str
    digest: str
    content: str
    stand_in: bool
    archive_sha256: str | None

    @property
    def facts(self) -> ImageFacts:
        return ImageFacts(self.image, self.digest, "", None, self.content, self.stand_in)


def pick_tool(wanted: str, image: str, env: Mapping[str, str]) -> str | None:
    """What starts containers here: None natively. Raises ToolchainMissing, UsageError."""
    if wanted == "none" or (wanted == "auto" and not image):
        return None
    if not image:
        raise UsageError(
            f"--slurm container={wanted} needs an image",
            next_step="narrowgauge images save TARGET --out FILE where Docker is, then"
            " --slurm image=FILE here",
        )
    tools = [tool for tool in _SUFFIX if shutil.which(tool, path=env.get("PATH"))]
    if wanted != "auto":
        tools = [tool for tool in tools if tool == wanted]
    ready = [tool for tool in tools if image.endswith(_SUFFIX[tool])]
    if not tools:
        raise ToolchainMissing(
            f"this site has no {' or '.join(_SUFFIX) if wanted == 'auto' else wanted}",
            why="the image was asked for, and nothing here starts containers",
            next_step="`module avail` may have it; natively: --slurm container=none",
        )
    return (ready or tools)[0]


def convert(file: Path, tool: str, env: Mapping[str, str], say: Say) -> Converted:
    """`file` for `tool`, beside it; at once where that was done before.

    Raises UsageError, DataCorrupt where a file is not what its note says, BuildFailed.
    """
    # unverified: images by apptainer and enroot | neither obtainable | --slurm image=FILE there
    if not file.is_file():
        raise UsageError(
            f"there is no {file}", next_step="narrowgauge images save TARGET --out FILE"
        )
    done = file if file.suffix == _SUFFIX[tool] else file.with_name(file.name + _SUFFIX[tool])
    note = done.with_name(done.name + ".json")
    if done.is_file() and note.is_file():
        known = decode(Converted, read_json(note), str(note))
        if known.sha256 != sha256_file(done):
            raise DataCorrupt(
                f"{done} is not what was converted",
                why=f"expected sha256 {known.sha256}",
                next_step=f"remove it and {note}: it is made again",
            )
        return known
    if done == file:
        raise UsageError(
            f"nothing says what image {file} is",
            why=f"there is no {note.name} beside it",
            next_step="give the archive that `images save` wrote: the note is made from it",
        )
    if tool == "enroot":
        raise UsageError(
            "enroot converts no archives",
            why="it imports from a registry or a Docker engine only",
            next_step=f"where Docker is: enroot import -o {done.name} dockerd://IMAGE",
        )
    return _build(file, done, note, tool, env, say)


def _build(
    file: Path, done: Path, note: Path, tool: str, env: Mapping[str, str], say: Say
) -> Converted:
    archive = decode(Archive, read_json(manifest_path(file)), str(manifest_path(file)))
    if archive.sha256 != sha256_file(file):
        raise DataCorrupt(
            f"{file} is not what was saved",
            why=f"expected sha256 {archive.sha256}",
            next_step="copy it again, together with its .json",
        )
    say(f"converting {archive.image} for {tool}: minutes, once")
    partial = done.with_name(done.name + ".partial")
    partial.unlink(missing_ok=True)
    _call([tool, "build", str(partial), f"docker-archive:{file}"], env)
    os.replace(partial, done)
    version = _call([tool, "--version"], env).strip()
    converted = Converted(
        NOTE_FORMAT, tool, version, str(done), sha256_file(done), archive.image, archive.digest,
        archive.content, archive.stand_in, archive.sha256,
    )  # fmt: skip
    write_json_atomic(note, converted)
    return converted


def container_command(image: Converted, places: Places, cache: Path, gpu: bool) -> tuple[str, ...]:
    """The words that start a job's lab in its container, its root read-only and nothing of the
    user's home in it; `OUT` stands for the folder that it writes to. Raises UsageError for a path
    that the tool would read as several."""
    binds = [(str(places.job), "/job.json", "ro"), ("OUT", "/out", "rw")]
    binds.append((str(places.experiments), "/experiments", "ro"))
    if places.data is not None:
        binds.append((str(places.data), "/data", "ro"))
    _refuse_paths(image.tool, [str(cache), *(source for source, _, _ in binds)])
    data = "/data" if places.data is not None else None
    lab = lab_arguments("/job.json", "/out", "/experiments", data)
    if image.tool == "apptainer":
        # Apptainer sets HOME by this alone; it refuses one in --env.
        words = ["apptainer", "run", "--containall", "--home", f"{cache}:/cache"]
        words += ["--nv"] if gpu else []
        for source, inside, mode in binds:
            words += ["--bind", f"{source}:{inside}:{mode}"]
    else:
        words = ["enroot", "start", "--env", "HOME=/cache"]
        for source, inside, mode in [*binds, (str(cache), "/cache", "rw")]:
            words += ["--mount", f"{source}:{inside}:none:x-create=auto,bind,{mode}"]
    return (*words, image.file, *lab)


def _refuse_paths(tool: str, paths: list[str]) -> None:
    signs = ":," if tool == "apptainer" else ":, \t"  # enroot writes them into an fstab
    for path in paths:
        if any(sign in path for sign in signs):
            raise UsageError(
                f"'{path}' cannot be given to a container",
                why=f"{tool} would read it as several words: it has one of {signs!r}",
                next_step="another folder: --results, --data or --project",
            )


def _call(words: list[str], env: Mapping[str, str]) -> str:
    done = subprocess.run(words, env=dict(env), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildFailed(
            f"{words[0]} could not convert the image",
            why="\n".join(done.stderr.strip().splitlines()[-5:]),
            next_step=f"by hand, to see all of it: {' '.join(words)}",
        )
    return done.stdout
