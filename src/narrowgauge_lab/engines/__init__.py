"""Engines: other people's and our own, each asked the same way to make a network ready.

`prepare(engine, model, example, Preparation(precision, device))` gives a `Runner`, which is called
with images, and says what each layer runs as. `missing(engine, device)` says why this host lacks
one. Libraries are imported when an engine is asked for that needs them.
"""

from narrowgauge_lab.engines.base import LayerFact, Preparation, Runner
from narrowgauge_lab.engines.cache import EngineCache
from narrowgauge_lab.engines.registry import ENGINES, missing, prepare

__all__ = ["ENGINES", "EngineCache", "LayerFact", "Preparation", "Runner", "missing", "prepare"]
