"""What every endpoint is given.

Owns: nothing; it holds the owner, the settings, the metrics and the running exchanges of one frontend together.
"""

from __future__ import annotations

from dataclasses import dataclass

from busllm.requests.protocol import Owner
from busllm.stages.frontend.metrics import FrontendMetrics
from busllm.stages.frontend.running import RunningExchanges
from busllm.stages.frontend.settings import FrontendSettings


@dataclass(frozen=True)
class Services:
    """What every endpoint is given."""

    owner: Owner
    settings: FrontendSettings
    metrics: FrontendMetrics
    running: RunningExchanges
