"""`ro-crate-metadata.json`: the bundle as a Process Run Crate, one action for each run.

Source of the form: Workflow Run RO-Crate, profile Process Run Crate 0.5
(https://w3id.org/ro/wfrun/process/0.5), on RO-Crate 1.1. The library makes the JSON-LD.
"""

from __future__ import annotations

import json
import mimetypes
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from narrowgauge.bundle.entries import Entry, Hashed
from narrowgauge.bundle.manifest import Manifest
from narrowgauge.bundle.runs import BundledRun
from narrowgauge.bundle.source import SOURCE_FOLDER
from narrowgauge_contract import __version__
from narrowgauge_contract.outcome import Status
from narrowgauge_contract.record import ImageFacts, Record

if TYPE_CHECKING:
    from rocrate.model import ContextEntity
    from rocrate.rocrate import ROCrate

__all__ = ["PROFILE", "crate_text"]

PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
_TERMS = "https://w3id.org/ro/terms/workflow-run/context"
_DOCKER_IMAGE = "https://w3id.org/ro/terms/workflow-run#DockerImage"
_LICENCE = "https://spdx.org/licenses/Apache-2.0"
_TYPES = {
    ".jsonl": "application/jsonl", ".toml": "application/toml", ".md": "text/markdown",
    ".gz": "application/gzip", ".tar": "application/x-tar", ".diff": "text/x-diff",
}  # fmt: skip


def crate_text(
    manifest: Manifest, runs: Sequence[BundledRun], files: Sequence[Hashed], name: str
) -> bytes:
    """The metadata file; equal arguments give equal bytes."""
    from rocrate.model import ContextEntity
    from rocrate.rocrate import ROCrate

    crate = ROCrate(version="1.1")
    crate.metadata.extra_contexts.append(_TERMS)
    root = crate.root_dataset
    crate.name = name
    crate.description = _description(manifest)
    crate.datePublished = _time(manifest.made_utc)
    crate.license = crate.add(
        ContextEntity(crate, _LICENCE, {"@type": "CreativeWork", "name": "Apache License 2.0"})
    )
    profile = {"@type": "CreativeWork", "name": "Process Run Crate", "version": "0.5"}
    root["conformsTo"] = crate.add(ContextEntity(crate, PROFILE, profile))
    entities = {each.entry.name: _add_file(crate, each) for each in files}
    agent = crate.add(
        ContextEntity(crate, "#narrowgauge", {
            "@type": "Organization", "name": "whoever ran Narrowgauge",
            "description": "Records name no person.",
        })
    )  # fmt: skip
    actions = [_add_run(crate, run, entities, agent) for run in runs]
    root["mentions"] = _one_or_all(actions)
    document = crate.metadata.generate()
    document["@graph"] = sorted(document["@graph"], key=_order)
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def _order(entity: Mapping[str, Any]) -> tuple[int, str]:
    """The metadata file's own entity and the root first, as readers expect them."""
    first = {"ro-crate-metadata.json": 0, "./": 1}
    return first.get(entity["@id"], 2), entity["@id"]


def _description(manifest: Manifest) -> str:
    missing = f"; {len(manifest.left_out)} things are left out, see bundle.json"
    return (
        f"{len(manifest.runs)} runs with records, sources, locks, images by digest and verdicts,"
        f" {manifest.kind} bundle by Narrowgauge {manifest.version}"
        f"{missing if manifest.left_out else ''}"
    )


def _add_file(crate: ROCrate, each: Hashed) -> ContextEntity:
    entry = each.entry
    properties = {
        "name": entry.name.rpartition("/")[2],
        "description": entry.what,
        "contentSize": str(each.bytes),
        "sha256": each.sha256,
        "encodingFormat": _media_type(entry),
    }
    return crate.add_file(dest_path=entry.name, properties=properties)


def _media_type(entry: Entry) -> str:
    suffix = "." + entry.name.rpartition(".")[2]
    return _TYPES.get(suffix) or mimetypes.types_map.get(suffix) or "text/plain"


def _add_run(
    crate: ROCrate, run: BundledRun, entities: Mapping[str, ContextEntity], agent: ContextEntity
) -> ContextEntity:
    record = run.record
    inputs, outputs = _inputs_and_outputs(run, entities)
    properties: dict[str, Any] = {
        "name": f"{record.experiment}, profile {record.profile}: {record.run_id}",
        "description": _command(record),
        "actionStatus": f"http://schema.org/{_action_status(record)}",
    }
    times = (("startTime", record.started_utc), ("endTime", record.ended_utc))
    properties |= {key: _time(seconds) for key, seconds in times if seconds is not None}
    if record.status is not Status.COMPLETE and record.error is not None:
        properties["error"] = record.error.what
    action = crate.add_action(
        instrument=_experiment(crate, record),
        identifier=f"#{record.run_id}",
        object=_one_or_all(inputs),
        result=_one_or_all(outputs),
        properties=properties,
    )
    action["agent"] = agent
    if record.host is not None and record.host.image is not None:
        action["containerImage"] = _image(crate, record.host.image)
    environment = _environment(crate, record)
    if environment:
        action["environment"] = _one_or_all(environment)
    return action


def _one_or_all(entities: list[ContextEntity]) -> Any:
    """RO-Crate 1.1 writes a single value without its list."""
    return entities[0] if len(entities) == 1 else entities


def _inputs_and_outputs(
    run: BundledRun, entities: Mapping[str, ContextEntity]
) -> tuple[list[ContextEntity], list[ContextEntity]]:
    names = [entry.name for entry in run.contents.entries]
    job = f"{run.folder}/job.json"
    outputs = [entities[name] for name in names if name != job]
    declared = f"{SOURCE_FOLDER}/experiments/{run.record.experiment}/experiment.toml"
    return [entities[name] for name in (job, declared) if name in entities], outputs


def _action_status(record: Record) -> str:
    done = record.status is Status.COMPLETE
    return "CompletedActionStatus" if done else "FailedActionStatus"


def _command(record: Record) -> str:
    """What did the same again; values are data, so it is told and not meant to be pasted."""
    given = " ".join(
        f"-p {name}={_listed(value)}" for name, value in sorted(record.parameters.items())
    )
    begin = f"narrowgauge run {record.experiment} --profile {record.profile}"
    return f"{begin} --seed {record.seed} {given}".rstrip()


def _listed(value: Any) -> str:
    return ",".join(str(each) for each in value) if isinstance(value, (list, tuple)) else str(value)


def _experiment(crate: ROCrate, record: Record) -> ContextEntity:
    from rocrate.model import ContextEntity

    identifier = f"#experiment-{record.experiment}-{record.hashes.experiment[:16]}"
    known = crate.dereference(identifier)
    if known is not None:
        return known
    head = record.spec.get("experiment")
    title = head.get("title", record.experiment) if isinstance(head, dict) else record.experiment
    properties = {
        "@type": "SoftwareApplication",
        "name": str(title),
        "url": f"{SOURCE_FOLDER}/experiments/{record.experiment}/",
        "softwareVersion": __version__,
        "identifier": f"sha256:{record.hashes.experiment}",
        "description": f"lab and kernels: sha256:{record.hashes.source}",
    }
    return crate.add(ContextEntity(crate, identifier, properties))


def _image(crate: ROCrate, facts: ImageFacts) -> ContextEntity:
    from rocrate.model import ContextEntity

    name, _, tag = facts.name.partition(":")
    properties = {
        "@type": "ContainerImage",
        "additionalType": {"@id": _DOCKER_IMAGE},
        "registry": "none: built from the Dockerfile here",
        "name": name,
        "tag": tag,
        "sha256": facts.digest.removeprefix("sha256:"),
        "description": f"on {facts.base}"
        + (f" ({facts.base_digest})" if facts.base_digest else "")
        + (", a stand-in base" if facts.stand_in else ""),
    }
    return crate.add(ContextEntity(crate, f"#image-{facts.digest}", properties))


def _environment(crate: ROCrate, record: Record) -> list[ContextEntity]:
    from rocrate.model import ContextEntity

    found = record.inside.environment if record.inside is not None else {}
    return [
        crate.add(
            ContextEntity(crate, f"#{record.run_id}-{name}", {
                "@type": "PropertyValue", "name": name, "value": found[name],
            })
        )
        for name in sorted(found)
    ]  # fmt: skip


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=timezone.utc).isoformat(timespec="seconds")
