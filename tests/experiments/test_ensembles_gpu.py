"""The experiment `ensembles` on a GPU: steps through several members, captured and compiled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from one_row import Rows

from narrowgauge_lab import torch_compat
from narrowgauge_scores.side_file import LOGITS_FILE, read_logits

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
# Eight full batches, three of which warm up, and four partial ones. At ten times this rate such a
# network is chaotic; at this one training moves logits by 0.05 and more, and rounding by 0.001.
ROWS = Rows(
    "ensembles",
    ("data=synthetic", "members=3", "epochs=4", "train_limit=70", "validation=30", "test_limit=40",
     "batch_size=32", "network=resnet18", "width=0.125", "layout=nhwc", "lr=0.0001"),
)  # fmt: skip
TOLERANCE = 0.01


def _answers(out: Path, *words: str) -> np.ndarray:
    row = ROWS.run(out, *words, device=CUDA)
    assert row.validity.valid, row.validity.reasons
    ran = {value for name, value in row.facts.items() if name.endswith("graphs_ran")}
    assert ran == {"off" if "graphs=off" in words else "cuda-graph"}
    return np.asarray(read_logits(out / "row-0" / LOGITS_FILE).test.logits)


@pytest.mark.parametrize("method", ["bagging", "fusion", "snapshot", "boosting"])
def test_captured_steps_do_what_launched_ones_do(tmp_path: Path, method: str) -> None:
    words = [f"method={method}", *(["members=2"] if method == "snapshot" else [])]
    captured = _answers(tmp_path / "captured", *words)
    launched = _answers(tmp_path / "launched", *words, "graphs=off")
    np.testing.assert_allclose(captured, launched, rtol=0.0, atol=TOLERANCE)


@pytest.mark.slow  # the compiler takes a minute
@pytest.mark.filterwarnings("ignore")  # what a compiler warns of is no fault of ours
@pytest.mark.parametrize("method", ["bagging", "fusion", "boosting"])
def test_members_that_are_compiled_are_captured_and_learn_the_same(
    tmp_path: Path, method: str
) -> None:
    if not torch_compat.compiler_available():
        pytest.skip("this torch does not compile")
    compiled = _answers(tmp_path / "compiled", f"method={method}", "compile=true")
    plain = _answers(tmp_path / "plain", f"method={method}")
    np.testing.assert_allclose(compiled, plain, rtol=0.0, atol=TOLERANCE)
