"""`logits.npz`: what one run of a network with several answers leaves for whoever scores it.

Every scalar of an anytime network follows from what each exit said of each image and what that
cost, so this is kept, and nothing that can be computed from it. An ordinary npz file, without
pickles; the same run gives the same bytes. Format 1 holds:

    meta             uint8 [bytes]: UTF-8 JSON, the fields of `RunLogits` that are no arrays, with
                     `kind` and `format`
    cumulative_macs  int64 [exits]: MACs per image up to an exit, all heads before it included
    direct_macs      int64 [exits]: the same without the heads before it
    latency          float64 [exits, repeats], optional: seconds to an exit's answer, batch of one,
                     at most 10,000 times
    test_logits      float16 or float32 [exits, images, classes]
    test_labels      int64 [images]: the true classes
    test_samples     int64 [images]: which images of the data set's test part these are
    test_macs        float64 [exits, images], optional: cumulative MACs where they depend on it
    test_base_correct  uint8 [images], optional: 1 where the plain network to judge it by is right
    val_…            the same of the validation split, whose samples are training images; optional,
                     all that are not or none

Files come from anywhere, so a reader trusts nothing: other entries than these, other compressions
than what `write_logits` uses, headers that numpy would not write, and texts that act on a terminal
instead of being read are refused.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional, Sequence, Tuple

import numpy as np

from narrowgauge_contract.errors import BadValueError, DamagedRecordError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["FORMAT", "KIND", "LOGITS_FILE", "RunLogits", "Split", "read_logits", "write_logits"]

LOGITS_FILE = "logits.npz"
KIND = "narrowgauge-anytime-logits"
#: 1: first.
FORMAT = 1

_FOREIGN = "it was not written by narrowgauge_scores.side_file.write_logits"
_AGAIN = "run the row again; a checkpoint of its training is not affected"
#: No zip file is older: without a date the same run gives the same bytes.
_DATE = (1980, 1, 1, 0, 0, 0)
#: Ten exits of 10,000 test and 5,000 validation images in 100 classes are 60 MB. More than this is
#: no logits file of ours, and would fill the memory before anything could be said.
_MOST_BYTES = 512 << 20
_MOST_REPEATS = 10_000
_MOST_LETTERS = 1000
_PLAIN_TEXTS = "letters that can be printed"
_ARRAYS = frozenset(
    (
        *("meta", "cumulative_macs", "direct_macs", "latency"),
        *("test_logits", "test_labels", "test_samples", "test_macs", "test_base_correct"),
        *("val_logits", "val_labels", "val_samples", "val_macs", "val_base_correct"),
    )
)
#: What numpy writes before an array of numbers. Read without evaluating anything: numpy's own
#: reader tokenises and evaluates it, and lets what goes wrong on the way through.
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<>|](?:f[248]|[iu][1248]))', "
    rb"'fortran_order': (False|True), 'shape': \(((?:\d{1,18}, )*(?:\d{1,18},?)?)\), \} *\n",
    re.DOTALL,
)
#: What zipfile raises for bytes that are not what they should be: they share no class.
#: RuntimeError is of encrypted entries, MemoryError of an entry that promises too much.
_UNREADABLE = (
    EOFError, IndexError, KeyError, MemoryError, NotImplementedError, OSError, OverflowError,
    RuntimeError, SyntaxError, TypeError, ValueError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Split:
    """What the exits said of one part of a data set; the module says what the arrays are."""

    logits: Array
    labels: Array
    samples: Array
    macs: Optional[Array] = None
    base_correct: Optional[Array] = None

    @property
    def exits(self) -> int:
        return int(self.logits.shape[0])

    @property
    def images(self) -> int:
        return int(self.logits.shape[1])

    @property
    def classes(self) -> int:
        return int(self.logits.shape[2])


@dataclasses.dataclass(frozen=True)
class RunLogits:
    """One run's answers.

    `family` is the system (`branchynet`) and `variant` which one of it (`b-lenet, width 1/4`), with
    whatever a reader must know, such as that it is a twin of a quarter of the width. `data` is the
    data set's name; `synthetic` where it was made up. `device` is where `latency` was measured.
    `base_accuracy` [%] and `base_macs` are those of the plain network that it is judged against,
    where there is one.
    """

    family: str
    variant: str
    data: str
    seed: int
    test: Split
    cumulative_macs: Array
    direct_macs: Array
    exit_names: Tuple[str, ...] = ()
    val: Optional[Split] = None
    latency: Optional[Array] = None
    device: str = ""
    synthetic: bool = False
    base_accuracy: Optional[float] = None
    base_macs: Optional[int] = None

    @property
    def exits(self) -> int:
        return self.test.exits

    def names(self) -> Tuple[str, ...]:
        """What the exits are called: their numbers from 0, where nobody named them."""
        return self.exit_names or tuple(f"exit {number}" for number in range(self.exits))


def write_logits(path: Path, run: RunLogits) -> None:
    """Write a run's answers. What would be no valid file is a BadValueError, and nothing is
    written: wrong shapes or types, logits that are not finite, labels beyond the classes, costs
    that fall. Raises OSError where the disk is full."""
    problem = _problem_of(run)
    if problem:
        raise BadValueError(
            f"these answers cannot be kept in {path.name}",
            why=problem,
            next_step="a training that diverged has no answers to keep; else see side_file's text",
        )
    meta = {"kind": KIND, "format": FORMAT, **_plain_fields(run)}
    text = json.dumps(meta, sort_keys=True, ensure_ascii=False).encode("utf-8")
    arrays = {"meta": np.frombuffer(text, np.uint8), **_arrays_of(run)}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(arrays):
            stream = io.BytesIO()
            np.lib.format.write_array(
                stream, np.ascontiguousarray(arrays[name]), allow_pickle=False
            )
            entry = zipfile.ZipInfo(f"{name}.npy", _DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, stream.getvalue())


def read_logits(path: Path) -> RunLogits:
    """Read and check a run's answers.

    Raises DamagedRecordError for a file that is missing, truncated, foreign, of a newer format, or
    whose arrays do not fit one another.
    """
    arrays = _load(path)
    meta = _meta_of(arrays, path)
    try:
        run = _compose(meta, arrays)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    problem = _problem_of(run)
    if problem:
        raise _damaged(path, problem)
    return run


def _load(path: Path) -> Dict[str, Array]:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if "meta.npy" not in (entry.filename for entry in entries):
                return {}  # somebody else's, which nobody looks into
            problem = _entries_problem(entries)
            if problem:
                raise _damaged(path, problem)
            return {entry.filename[:-4]: _array_of(archive.read(entry)) for entry in entries}
    except FileNotFoundError as error:
        raise DamagedRecordError(
            f"{path} is missing", why="the run's row wrote no answers, or they were removed",
            next_step=_AGAIN,
        ) from error  # fmt: skip
    except _UNREADABLE as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _entries_problem(entries: Sequence[zipfile.ZipInfo]) -> str:
    """Why these are not the entries of an answers' file, before anything of them is unpacked."""
    size = sum(entry.file_size for entry in entries)
    if size > _MOST_BYTES:
        return f"it says that it holds {size} bytes; {_MOST_BYTES} are the most"
    names = [entry.filename for entry in entries]
    if len(set(names)) < len(names):
        return "two of its entries have one name"
    foreign = sorted(set(names) - {f"{name}.npy" for name in _ARRAYS})
    if foreign:
        return f"{foreign[0]!a} is no entry of such a file"
    ours = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    packed = [entry for entry in entries if entry.compress_type not in ours]
    if packed:
        return f"{packed[0].filename} is packed by method {packed[0].compress_type}"
    return ""


def _array_of(content: bytes) -> Array:
    """The array of an npy file of numbers. Raises ValueError for what is none."""
    header = _HEADER.match(content)
    if header is None or struct.unpack("<H", content[8:10])[0] != header.end() - 10:
        raise ValueError("an entry has no header of an array of numbers")
    kind, turned, sizes = (part.decode("ascii") for part in header.groups())
    shape = tuple(int(each) for each in sizes.split(",") if each.strip())
    dtype = np.dtype(kind)
    if math.prod(shape) * dtype.itemsize != len(content) - header.end():
        raise ValueError(f"an entry promises {list(shape)} of {dtype}, and holds something else")
    flat = np.frombuffer(content, dtype, offset=header.end())
    found: Array = flat.reshape(shape, order="F" if turned == "True" else "C").copy()
    return found


def _meta_of(arrays: Mapping[str, Array], path: Path) -> Dict[str, Any]:
    raw = arrays.get("meta")
    try:
        if raw is None or raw.dtype != np.uint8:
            raise ValueError("no entry 'meta'")
        meta = json.loads(raw.tobytes().decode("utf-8"))
        if not isinstance(meta, dict) or meta.get("kind") != KIND:
            raise ValueError(f"its kind is not '{KIND}'")
    except (ValueError, RecursionError) as error:
        raise DamagedRecordError(
            f"{path} is no file of an anytime network's answers",
            why=f"{error}; {_FOREIGN}",
            next_step=f"give the {LOGITS_FILE} of a run's row",
        ) from error
    # JSON's true equals 1.
    if type(meta.get("format")) is not int or meta["format"] != FORMAT:
        raise DamagedRecordError(
            f"{path} has format {meta.get('format')!r}, this reads {FORMAT}",
            why="another version of Narrowgauge wrote it",
            next_step="update, or run the row again",
        )
    return meta


def _damaged(path: Path, why: str) -> DamagedRecordError:
    return DamagedRecordError(f"{path} is truncated or damaged", why=why, next_step=_AGAIN)


_TEXTS = ("family", "variant", "data", "device")


def _plain_fields(run: RunLogits) -> Dict[str, Any]:
    plain = {name: getattr(run, name) for name in _TEXTS}
    plain.update(
        seed=int(run.seed),
        synthetic=bool(run.synthetic),
        exit_names=list(run.exit_names),
        base_accuracy=None if run.base_accuracy is None else float(run.base_accuracy),
        base_macs=None if run.base_macs is None else int(run.base_macs),
    )
    return plain


def _arrays_of(run: RunLogits) -> Dict[str, Array]:
    found = {
        "cumulative_macs": run.cumulative_macs,
        "direct_macs": run.direct_macs,
        "latency": run.latency,
    }
    for prefix, split in (("test", run.test), ("val", run.val)):
        if split is not None:
            for name in ("logits", "labels", "samples", "macs", "base_correct"):
                found[f"{prefix}_{name}"] = getattr(split, name)
    return {name: array for name, array in found.items() if array is not None}


def _compose(meta: Mapping[str, Any], arrays: Mapping[str, Array]) -> RunLogits:
    for name in _TEXTS:
        if not isinstance(meta[name], str):
            raise TypeError(f"'{name}' is no text")
    if type(meta["seed"]) is not int or not isinstance(meta["synthetic"], bool):
        raise TypeError("'seed' or 'synthetic' is of another type")
    names = meta["exit_names"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError("'exit_names' are no texts")
    for name, kinds in (("base_accuracy", (int, float)), ("base_macs", (int,))):
        if meta[name] is not None and type(meta[name]) not in kinds:
            raise TypeError(f"'{name}' is no number")
    has_val = any(name.startswith("val_") for name in arrays)
    return RunLogits(
        family=meta["family"],
        variant=meta["variant"],
        data=meta["data"],
        seed=meta["seed"],
        test=_split("test", arrays),
        cumulative_macs=arrays["cumulative_macs"],
        direct_macs=arrays["direct_macs"],
        exit_names=tuple(meta["exit_names"]),
        val=_split("val", arrays) if has_val else None,
        latency=arrays.get("latency"),
        device=meta["device"],
        synthetic=meta["synthetic"],
        base_accuracy=meta["base_accuracy"],
        base_macs=meta["base_macs"],
    )


def _split(prefix: str, arrays: Mapping[str, Array]) -> Split:
    needed = (arrays[f"{prefix}_{name}"] for name in ("logits", "labels", "samples"))
    optional = (arrays.get(f"{prefix}_{name}") for name in ("macs", "base_correct"))
    return Split(*needed, *optional)


def _problem_of(run: RunLogits) -> str:
    """Why these are no answers of a network; empty where they are."""
    found = _text_problem(run) or _split_problem("test", run.test)
    if not found and run.val is not None:
        found = _split_problem("val", run.val)
        if not found and (run.val.exits, run.val.classes) != (run.exits, run.test.classes):
            found = "the validation split has other exits or classes than the test split"
    if found:
        return found
    found = _costs_problem(run)
    if found:
        return found
    base = run.base_accuracy
    if base is not None and not 0 <= base <= 100:
        return f"base_accuracy is {base}, and should be 0 to 100 %"
    if run.base_macs is not None and not (run.base_macs > 0 and run.base_macs < 2**62):
        return f"base_macs is {run.base_macs}"
    size = sum(array.nbytes for array in _arrays_of(run).values())
    return f"they are {size} bytes; {_MOST_BYTES} are the most" if size > _MOST_BYTES else ""


def _text_problem(run: RunLogits) -> str:
    """Texts are shown on terminals, in pictures and in tables: none may act there."""
    names: Any = run.exit_names
    if not isinstance(names, tuple):
        return "exit_names are no tuple of names"
    texts = [(name, getattr(run, name)) for name in _TEXTS]
    texts += [("exit_names", each) for each in names]
    for name, text in texts:
        if not isinstance(text, str) or not text.isprintable() or len(text) > _MOST_LETTERS:
            return f"{name}: {text!a:.60} should be at most {_MOST_LETTERS} {_PLAIN_TEXTS}"
    return "" if run.family and run.data else "family and data are empty"


def _costs_problem(run: RunLogits) -> str:
    for name in ("cumulative_macs", "direct_macs"):
        macs = getattr(run, name)
        if not _is(macs, np.int64, (run.exits,)) or macs[0] <= 0 or (np.diff(macs) < 0).any():
            return f"{name} should be int64 [{run.exits}], positive and never falling"
    if (run.direct_macs > run.cumulative_macs).any():
        return "direct_macs are above cumulative_macs: an exit costs less without earlier heads"
    if run.exit_names and len(run.exit_names) != run.exits:
        return f"{len(run.exit_names)} names for {run.exits} exits"
    if run.latency is not None:
        shapely = _is(run.latency, np.float64, (run.exits, None)) and run.latency.size
        if not shapely or not np.isfinite(run.latency).all() or (run.latency <= 0).any():
            return f"latency should be float64 [{run.exits}, repeats], finite seconds above 0"
        if run.latency.shape[1] > _MOST_REPEATS:
            return f"latency has {run.latency.shape[1]} repeats; {_MOST_REPEATS} are the most"
    return ""


def _split_problem(name: str, split: Split) -> str:
    logits = split.logits
    if not _is(logits, np.float32, (None, None, None)) and not _is(logits, np.float16, (None,) * 3):
        return f"{name}_logits should be float16 or float32 [exits, images, classes]"
    if min(logits.shape[:2]) < 1 or logits.shape[2] < 2:
        return f"{name}_logits are {list(logits.shape)}: no exit, no image, or fewer than 2 classes"
    if not np.isfinite(logits).all():
        return f"{name}_logits hold NaN or infinity"
    for what in ("labels", "samples"):
        array = getattr(split, what)
        if not _is(array, np.int64, (split.images,)) or array.min() < 0:
            return f"{name}_{what} should be int64 [{split.images}], 0 or more"
    if split.labels.max() >= split.classes:
        return f"{name}_labels go up to {split.labels.max()}, of {split.classes} classes"
    if len(np.unique(split.samples)) < split.images:
        return f"{name}_samples name an image twice"
    macs = split.macs
    if macs is not None:
        fits = _is(macs, np.float64, (split.exits, split.images)) and np.isfinite(macs).all()
        if not fits or macs.min() <= 0 or (np.diff(macs, axis=0) < 0).any():
            return f"{name}_macs should be float64 [exits, images], positive and never falling"
    base = split.base_correct
    if base is not None and not (_is(base, np.uint8, (split.images,)) and base.max() <= 1):
        return f"{name}_base_correct should be uint8 [{split.images}] of 0 and 1"
    return ""


def _is(array: Any, kind: Any, shape: Tuple[Optional[int], ...]) -> bool:
    """Whether it is an array of that type and shape; None stands for any length."""
    return (
        isinstance(array, np.ndarray)
        and array.dtype == kind
        and array.ndim == len(shape)
        and all(want in (None, have) for want, have in zip(shape, array.shape))
    )
