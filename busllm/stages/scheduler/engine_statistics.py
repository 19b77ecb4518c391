"""An engine's counts as a scheduler announces them.

Owns: the names in `statistics` of a scheduler's announcement.
"""

from __future__ import annotations

from typing import Any

from busllm.engine.sequence import EngineStatistics


def engine_statistics(counts: EngineStatistics | None) -> dict[str, Any]:
    """The counts; empty while the engine loads."""
    if counts is None:
        return {}
    return {
        "running": counts.running,
        "waiting": counts.waiting,
        "kv_pages": {
            "total": counts.pages_total,
            "free": counts.pages_free,
            "cached": counts.pages_cached,
            "owned": counts.pages_owned,
        },
        "page_tokens": counts.page_tokens,
        "steps": counts.steps,
        "tokens": {
            "prompt": counts.prompt_tokens,
            "cached_prompt": counts.cached_prompt_tokens,
            "output": counts.output_tokens,
        },
        "retractions": counts.retractions,
        "attention": counts.attention,
    }
