"""A model's sliding window, made short for the test at load.

Owns: where a model of `transformers` keeps its window, and putting it back.
Does not know: what is tested (`self_test.py`).
Next on the path: `models/hooked/load.py`.

Published windows are thousands of tokens wide, and a test that shows what lies beyond one would take as many. The
width is a number that mask and attention read from the configuration, so the same code is tested with a small one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

SHORT_WINDOW = 24
_NAME = "sliding_window"


@contextmanager
def short_window(model: PreTrainedModel) -> Iterator[int | None]:
    """Holds a model's window at `SHORT_WINDOW` tokens, or at its own when that is less.

    Yields:
        The window in force; None = the model has none, or none that its context exceeds.
    """
    text = model.config.get_text_config()
    declared = getattr(text, _NAME, None)
    if declared is None or declared >= text.max_position_embeddings:
        yield None
        return
    places: list[Any] = [text]
    for module in model.modules():
        places += [module, getattr(module, "config", None)]
    holders = {id(place): place for place in places if getattr(place, _NAME, None) == declared}.values()
    in_force = min(declared, SHORT_WINDOW)
    for holder in holders:
        setattr(holder, _NAME, in_force)
    try:
        yield in_force
    finally:
        for holder in holders:
            setattr(holder, _NAME, declared)
