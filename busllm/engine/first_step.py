"""A loaded model's first step, before anybody's: are its logits numbers?

Owns: the check that a start makes, so that weights or settings that give NaN are refused there.
Does not know: why they are none, files, requests.
"""

from __future__ import annotations

import numpy as np

from busllm.engine.model_runner import ModelRunner
from busllm.errors import ModelError
from busllm.plan import PagesAssigned, PlanRow, SlotOpened, StepPlan
from busllm.sampling import SamplingParams

_NUM_TOKENS = 4
_PAGE_TOKENS = 16


def check_first_step(runner: ModelRunner) -> None:
    """Computes a few tokens in a cache of their own.

    Args:
        runner: of a whole model; need not be allocated.

    Raises:
        ModelError: what comes out are no numbers.
    """
    twin = runner.unallocated_twin()
    twin.allocate(num_pages=1, page_tokens=_PAGE_TOKENS, max_running=1, max_context_tokens=_PAGE_TOKENS)
    token_ids = (np.arange(_NUM_TOKENS, dtype="<i4") % runner.model.vocab_size).tobytes()
    row = PlanRow(slot=0, start=0, num_tokens=_NUM_TOKENS, token_ids=token_ids, from_step=None, samples=True)
    plan = StepPlan(
        number=0,
        rows=(row,),
        num_decode_rows=0,
        opened=(SlotOpened(0, SamplingParams(temperature=0.0), 0, token_ids, _NUM_TOKENS),),
        pages=(PagesAssigned(0, 0, (0,)),),
    )
    result = twin.collect(twin.launch(plan))
    twin.close()
    if not all(sampled.is_finite for sampled in result.rows):
        raise ModelError("The model computes numbers that are not finite. A value of config.json may be wrong.")
