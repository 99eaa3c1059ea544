"""The images of a bundle: whole where they may be given away, else only what rebuilds them.

NVIDIA's licence keeps the layers of its containers: who registers may pull them, not pass them on.
So a public bundle holds an image only where its base is known to be free, and a full one holds
every image, for readers who may have them.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.bundle.entries import Entry
from narrowgauge.bundle.manifest import Contents, ImageIn, Kind, LeftOut
from narrowgauge.errors import BuildFailed, NarrowgaugeError
from narrowgauge.images.archive import manifest_path, save_archive
from narrowgauge.images.client import BuildClient
from narrowgauge_contract.record import ImageFacts

__all__ = ["FREE_BASES", "ImagesIn", "may_be_given", "sboms_of", "take_images"]

#: Where bases come from whose terms let anybody pass them on: Docker's official images.
FREE_BASES = ("docker.io/library/",)
# unverified: SBOM of a saved image | no engine whose store keeps attestations | bundle --full there
_SPDX = "https://spdx.dev/Document"
_PREDICATE = "in-toto.io/predicate-type"
_REFERENCE = "vnd.docker.reference.type"
_ATTESTATION = "attestation-manifest"
_MOST_JSON_BYTES = 64 << 20
_NO_SBOM = (
    "the builder attested none: docker's own image store keeps no attestations; each record lists"
    " the Python packages that ran"
)


@dataclass(frozen=True)
class ImagesIn:
    """What of the images is in the bundle."""

    images: tuple[ImageIn, ...]
    contents: Contents


def may_be_given(facts: ImageFacts) -> bool:
    """Whether the base's terms are known to let anybody pass the image on."""
    return facts.base.startswith(FREE_BASES)


def take_images(
    used: Sequence[ImageFacts],
    kind: Kind,
    client: Callable[[], BuildClient],
    folder: Path,
    say: Callable[[str], None],
) -> ImagesIn:
    """Save what `kind` may hold of the images `used` into `folder`.

    A full bundle raises what saving raises; a public one goes on without an image that is not here.
    """
    found: list[ImageIn] = []
    parts: list[Entry] = []
    left_out: list[LeftOut] = []
    for number, facts in enumerate(_distinct(used)):
        if kind == "public" and not may_be_given(facts):
            found.append(ImageIn(facts))
            left_out.append(LeftOut(f"the image {facts.name}", _kept(facts)))
            continue
        try:
            image, entries = _save(facts, number, client(), folder, say)
        except NarrowgaugeError as error:
            if kind == "full":
                raise
            found.append(ImageIn(facts))
            left_out.append(LeftOut(f"the image {facts.name}", error.what))
            continue
        found.append(image)
        parts += entries
        if not image.sboms:
            left_out.append(LeftOut(f"an SBOM of {facts.name}", _NO_SBOM))
    return ImagesIn(tuple(found), Contents(tuple(parts), tuple(left_out)))


def _distinct(used: Sequence[ImageFacts]) -> tuple[ImageFacts, ...]:
    by_digest = {facts.digest: facts for facts in used}
    return tuple(by_digest[digest] for digest in sorted(by_digest))


def _kept(facts: ImageFacts) -> str:
    pinned = f", {facts.base_digest}" if facts.base_digest else ""
    keeper = (
        "NVIDIA's licence does not let its layers be passed on"
        if facts.base.startswith("nvcr.io/")
        else "it is not known that its base may be passed on"
    )
    return (
        f"it stands on {facts.base}{pinned}, and {keeper}; the Dockerfile, the lock and the base's"
        " name are here, and `narrowgauge images build` makes it again where the base can be pulled"
    )


def _save(
    facts: ImageFacts,
    number: int,
    client: BuildClient,
    folder: Path,
    say: Callable[[str], None],
) -> tuple[ImageIn, list[Entry]]:
    file = folder / f"image-{number}.tar"
    # By digest: the name may be another image's by now.
    archive = save_archive(client, facts.digest, file, say)
    if archive.digest != facts.digest:
        raise BuildFailed(
            f"the engine's {facts.name} is not the image that ran",
            why=f"{archive.digest} instead of {facts.digest}",
        )
    stem = f"images/{number}-{facts.content_tag or facts.digest.rpartition(':')[2][:16]}"
    entries = [
        Entry(f"{stem}.tar", f"the image {facts.name}", source=file),
        Entry(f"{stem}.tar.json", "what tells whether it is whole", source=manifest_path(file)),
    ]
    sboms = [
        Entry(f"sbom/{number}-{place}.spdx.json", f"what the builder says is in {facts.name}",
              content=text)
        for place, text in enumerate(sboms_of(file))
    ]  # fmt: skip
    image = ImageIn(facts, f"{stem}.tar", tuple(each.name for each in sboms))
    return image, entries + sboms


def sboms_of(file: Path) -> tuple[bytes, ...]:
    """The SPDX documents that BuildKit attested, from an image saved as an OCI layout.

    Empty where the engine's store kept none. Raises BuildFailed where the layout is damaged.
    """
    try:
        with tarfile.open(file) as archive:
            if "index.json" not in archive.getnames():
                return ()
            index = _json(archive, "index.json")
            return tuple(
                json.dumps(_blob(archive, layer)["predicate"], indent=1, sort_keys=True).encode()
                for manifest in _attestations(archive, index)
                for layer in manifest.get("layers", ())
                if layer.get("annotations", {}).get(_PREDICATE) == _SPDX
            )
    except (tarfile.TarError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise BuildFailed(f"{file} is no image that can be read", why=str(error)) from error


def _attestations(archive: tarfile.TarFile, index: Any, depth: int = 0) -> Iterator[Any]:
    for each in index.get("manifests", ()):
        if each.get("annotations", {}).get(_REFERENCE) == _ATTESTATION:
            yield _blob(archive, each)
        elif "index" in each.get("mediaType", "") and depth < 2:
            yield from _attestations(archive, _blob(archive, each), depth + 1)


def _blob(archive: tarfile.TarFile, descriptor: Any) -> Any:
    algorithm, _, digest = descriptor["digest"].partition(":")
    return _json(archive, f"blobs/{algorithm}/{digest}")


def _json(archive: tarfile.TarFile, name: str) -> Any:
    stream = archive.extractfile(name)
    if stream is None:
        raise ValueError(f"{name} is no file")
    with stream:
        return json.loads(stream.read(_MOST_JSON_BYTES))
