"""The bundle's own README.md: what is where, how to check it, what is missing."""

from __future__ import annotations

from datetime import datetime, timezone

from narrowgauge.bundle.manifest import ImageIn, Manifest

__all__ = ["readme_text"]

_HEAD = """# A {kind} bundle by Narrowgauge {version}

Made {made}{commit}.
It holds {runs} runs: their records with raw samples, the sources they came from, and what is needed to run them again.

| where | what |
|---|---|
| `bundle.json` | what is here, and what is left out and why |
| `SHA256SUMS` | the sha256 of every other file |
| `ro-crate-metadata.json` | the same as a Process Run Crate (Workflow Run RO-Crate 0.5) |
| `verdicts.json`, `statement.intoto.json` | the verdicts on the claims, as Narrowgauge's and as an in-toto statement |
| `report.html` | the verdicts as a page, which needs no network |
| `runs/<experiment>/<run>/` | `record.json`, `job.json`, events and side files |
| `occasions/<time>/` | each `reproduce`: its plan with the seed of its order, its steps, what it judged then |
| `source/` | Narrowgauge and the experiments: Dockerfiles in `source/images/`, locks in `source/docker/locks/` |
| `images/`, `sbom/` | the images themselves, where they may be given |
| `host.json`, `git.json`, `git.diff` | the host that bundled, the commit, what differed from it |
| `data.json` | where the data sets come from, by sha256 |

## Check it

Anywhere, without a network:

```sh
narrowgauge verify-bundle FILE.zip      # every byte, then records, then verdicts anew from the records
sha256sum -c SHA256SUMS                 # or, unpacked, without Narrowgauge
```

Both find damage, not forgery: compare the sha256 of the whole file with the one that its authors published.

## Run it again

`cd source`, then `./scripts/run.sh EXPERIMENT`, or `narrowgauge reproduce` for the claims. `source/README.md` says the rest.
"""  # noqa: E501 - the lines of a document


def readme_text(manifest: Manifest) -> str:
    """The text; texts from records stand in code spans and cannot end them."""
    made = datetime.fromtimestamp(manifest.made_utc, tz=timezone.utc)
    git = manifest.git
    commit = f" from commit {git.commit}{', changed' if git.dirty else ''}" if git else ""
    parts = [
        _HEAD.format(
            kind=manifest.kind,
            version=manifest.version,
            made=f"{made:%Y-%m-%d %H:%M} UTC",
            commit=commit,
            runs=len(manifest.runs),
        )
    ]
    if manifest.images:
        parts.append("## Images\n\n" + "\n".join(map(_image, manifest.images)) + "\n")
    if manifest.left_out:
        lines = (f"- {_code(left.what)}: {_code(left.why)}" for left in manifest.left_out)
        parts.append("## Left out\n\n" + "\n".join(lines) + "\n")
    changed = [run.run_id for run in manifest.runs if not run.same_experiment]
    if changed:
        lines = (f"- {_code(run)}" for run in changed)
        parts.append(
            "## Sources that are not those that ran\n\n"
            "The experiment here differs from the one that these runs measured:\n\n"
            + "\n".join(lines)
            + "\n"
        )
    return "\n".join(parts)


def _image(image: ImageIn) -> str:
    facts = image.facts
    where = f"in `{image.archive}`" if image.archive else "left out"
    return f"- {_code(facts.name)} {_code(facts.digest)} on {_code(facts.base)}: {where}"


def _code(text: str) -> str:
    """As code that stays on its line, whatever is in it."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    return f"`{shown.replace('`', chr(39))}`"
