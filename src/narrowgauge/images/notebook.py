"""The image with JupyterLab: the Dockerfile's notebook stage, made when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from narrowgauge.images.build import BuildRequest, make_context, stream_command
from narrowgauge.images.client import find_client
from narrowgauge.images.content import LABEL_CONTENT, LABEL_SOURCE, dockerfile_path, source_hash
from narrowgauge.targets import Target
from narrowgauge_contract.record import ImageFacts

__all__ = ["ensure_notebook_image", "notebook_image_name"]


def notebook_image_name(target: Target, image: ImageFacts) -> str:
    """`narrowgauge/cpu-notebook:<content tag>`: of what the image for runs holds, and Jupyter.

    An image of somebody else's has no content tag, so its digest names it; a tag has no colon.
    """
    tag = image.content_tag or image.digest.rpartition(":")[2]
    return f"narrowgauge/{target.name}-notebook:{tag}"


def ensure_notebook_image(
    root: Path,
    target: Target,
    image: ImageFacts,
    env: Mapping[str, str],
    say: Callable[[str], None],
) -> str:
    """The notebook's image by name, built where it is not there; on a stand-in where `image` is.

    Only its last stage is built: the others are those of `image`, as BuildKit keeps them. Raises
    what `images.build.ensure_image` raises.
    """
    name = notebook_image_name(target, image)
    client = find_client(target.builder, env)
    if client.inspect(name) is not None:
        return name
    base = image.base if image.stand_in else None
    say(f"building {name}: JupyterLab on what runs use")
    labels = {LABEL_CONTENT: image.content_tag, LABEL_SOURCE: source_hash(root)}
    with make_context(BuildRequest(root, target, base=base, env=env)) as context:
        words = [*client.build_words(), "--progress=plain", "--target", "notebook", "--tag", name]
        for key, value in sorted(labels.items()):
            words += ["--label", f"{key}={value}"]
        words += ["--file", str(context / dockerfile_path(target)), str(context)]
        stream_command(words, client.build_environment(), f"the build of {name} failed", say)
    return name
