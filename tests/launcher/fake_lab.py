"""A stand-in for the lab, as a package on disk: says what a lab says, in the ways tests ask for.

Its behaviour is in the job's `width`: it may not read the environment, as the true lab does not.
"""

from __future__ import annotations

from pathlib import Path

#: width → what this lab does after its first metric.
FINE, SLOW, FAILS, SILENT, SPAWNS, STUBBORN = 0, 1, 2, 3, 4, 5

SOURCE = """
import json, os, signal, sys, time
from pathlib import Path
from narrowgauge_contract.codec import write_json_atomic
from narrowgauge_contract.events import EventKind, EventLog, read_events
from narrowgauge_contract.job import load_job
from narrowgauge_contract.outcome import Fold, Status, fold_outcome

words = dict(zip(sys.argv[2::2], sys.argv[3::2]))
out, job = Path(words["--out"]), load_job(Path(words["--job"]))
width = job.parameters["width"]
log = EventLog(out / "events.jsonl")

def end(status, code):
    log.emit(EventKind.ROW_END, 0, status=status.value, seconds=0.1, error=None)
    fold = Fold().add_all(read_events(out / "events.jsonl"))
    write_json_atomic(out / "outcome.json", fold_outcome(job, fold, status, code))
    sys.exit(code)

def stop(number, frame):
    end(Status.INTERRUPTED, 130)

signal.signal(signal.SIGTERM, signal.SIG_IGN if width == 5 else stop)
print("the lab speaks")
sys.stdout.flush()
if width == 3:
    sys.exit(7)
inside = {"python": "3", "platform": "p"}
log.emit(EventKind.RUN_START, inside=inside, source_hash="s", experiment_hash="e")
row = job.rows[0]
log.emit(EventKind.ROW_START, 0, repeat=0, seed=row.seed, parameters=row.parameters)
log.emit(EventKind.METRIC, 0, name="loss", unit="", source="count", values=[1.0])
if width == 4 and os.fork() == 0:
    (out / "grandchild").write_text(str(os.getpid()))
    time.sleep(600)
if width in (1, 4, 5):
    time.sleep(600)
end(Status.FAILED if width == 2 else Status.COMPLETE, 30 if width == 2 else 0)
"""


def install(source: Path) -> Path:
    """Put the package below `source`, which then goes on PYTHONPATH beside the true contract."""
    package = source / "narrowgauge_lab"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(SOURCE)
    contract = Path(__file__).parents[2] / "src" / "narrowgauge_contract"
    (source / "narrowgauge_contract").symlink_to(contract)
    return source
