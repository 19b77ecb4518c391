"""How long a decode step of the model takes, by batch and by context.

Owns: plans for a runner as the engine would make them: slots opened, pages assigned, one row per sequence.
Does not know: the forward pass; it is measured through `Runner`, sampling included. The keys and values of the context
are zeros, which are read and computed with like any others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from bench.scaling.figure import Figure, curves
from busllm.engine.loader import LoadConfig, load_runner
from busllm.engine.runner import Runner
from busllm.plan import PagesAssigned, PlanRow, SlotOpened, StepPlan
from busllm.sampling import SamplingParams

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 256, 512, 1_024, 2_048, 4_096, 8_000)
SHORT_CONTEXT = 160
LONG_CONTEXT = 1_000
PAGE_TOKENS = 16
NUM_STEPS = 20
GREEDY = SamplingParams(temperature=0.0)


def figures(model: str) -> Iterator[Figure]:
    """By batch, then by context; with the compiled pass, which is loaded once."""
    runner = load_runner(model, LoadConfig(device="cpu", attention="cpu"))
    name = f"{model}, {runner.model.attention}"
    yield Figure(
        name="step_batch",
        title=f"A decode step by batch ({name})",
        x_label="sequences in the step",
        y_label="ms",
        curves=curves(
            tuple(f"context of {context} tokens" for context in (SHORT_CONTEXT, LONG_CONTEXT)),
            BATCHES,
            lambda batch: [_step_ms(runner, batch, context) for context in (SHORT_CONTEXT, LONG_CONTEXT)],
        ),
        log_y=True,
    )
    yield Figure(
        name="step_context",
        title=f"A decode step by context ({name})",
        x_label="tokens before the new one, of each sequence",
        y_label="ms",
        curves=curves(
            ("1 sequence", "8 sequences"),
            CONTEXTS,
            lambda context: [_step_ms(runner, batch, context) for batch in (1, 8)],
        ),
        log_y=True,
    )
    runner.close()


def _step_ms(runner: Runner, batch: int, context: int) -> float:
    """The fastest of some steps, since what else a machine does only adds; sequences grow by a token in each."""
    pages_each = -(-(context + NUM_STEPS + 1) // PAGE_TOKENS)
    runner.allocate(
        num_pages=batch * pages_each,
        page_tokens=PAGE_TOKENS,
        max_running=batch,
        max_context_tokens=context + NUM_STEPS + 1,
    )
    source = np.random.default_rng(0)
    ids = source.integers(0, runner.model.vocab_size, context).astype("<i4").tobytes()
    shuffled = source.permutation(batch * pages_each).tolist()
    tables = [tuple(shuffled[slot * pages_each : (slot + 1) * pages_each]) for slot in range(batch)]
    opened = tuple(SlotOpened(slot, GREEDY, slot, ids, 1) for slot in range(batch))
    pages = tuple(PagesAssigned(slot, 0, tables[slot]) for slot in range(batch))
    newest = [ids[-4:]] * batch
    times_ms = []
    for number in range(NUM_STEPS):
        position = context - 1 + number
        rows = tuple(PlanRow(slot, position, 1, newest[slot], None, True) for slot in range(batch))
        first = number == 0
        plan = StepPlan(number + 1, rows, batch, opened if first else (), (), pages if first else ())
        began_s = time.perf_counter()
        result = runner.collect(runner.launch(plan))
        times_ms.append((time.perf_counter() - began_s) * 1e3)
        newest = [row.token_ids[0].to_bytes(4, "little") for row in result.rows]
    return min(times_ms[2:])
