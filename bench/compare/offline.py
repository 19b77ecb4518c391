"""The engine without a server: `busllm.LLM` computes a row's requests in a process of its own.

Owns: that process, from its command line to the figures that it writes. The model is loaded and warm before the clock
starts; it stops with the last token. In between is what `LLM` does for a text: encode, compute, sample, decode.
Does not know: which row it is (`rows.py`), what the figures are compared with (`summary.py`).
Next on the path: `client.py` reads them.

As many sequences run at once as there would be clients, and when one ends the next is taken up in the next step: the
load of clients that send their next request as soon as an answer has ended.
"""

from __future__ import annotations

import sys
import time

import msgspec

import busllm
from bench.compare.results import RowResult
from bench.compare.rows import Figure
from busllm.cli.load.workload import Workload
from busllm.telemetry.logging import configure_logging


class _Body(msgspec.Struct):
    """The part of a request that the engine gets."""

    prompt: str
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    ignore_eos: bool = False

    @property
    def sampling(self) -> busllm.SamplingParams:
        return busllm.SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, ignore_eos=self.ignore_eos
        )


class Offline(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be computed.

    Attributes:
        source: of the model.
        quantization: of its weights.
        kv_tokens: capacity of the KV cache.
        workload: the requests; text completions without one that arrives later.
        max_running: sequences at the same time.
    """

    source: str
    quantization: str
    kv_tokens: int
    workload: Workload
    max_running: int

    def command(self) -> tuple[str, ...]:
        """The command line of a process that computes it and writes a `RowResult` as JSON."""
        return (sys.executable, "-m", "bench.compare.offline", msgspec.json.encode(self).decode())

    def measure(self) -> RowResult:
        """Computes it in this process.

        Raises:
            BusllmError: the model cannot be loaded, or a request is impossible.
        """
        warmup = msgspec.structs.replace(self.workload, warmup=self.max_running)
        options = {"quantization": self.quantization, "kv_tokens": self.kv_tokens, "max_running": self.max_running}
        with busllm.LLM(self.source, **options) as llm:
            _generate(llm, warmup.warmup_bodies(self.source))
            bodies = self.workload.bodies(self.source)
            began_s, cpu_s = time.perf_counter(), time.process_time()
            num_tokens = _generate(llm, bodies)
            wall_s, used_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        return RowResult(
            figures={Figure.OUTPUT.value: round(num_tokens / wall_s, 1), Figure.CPU.value: 1e3 * used_s / num_tokens}
        )


def _generate(llm: busllm.LLM, bodies: list[bytes]) -> int:
    """Answers all; how many tokens that were."""
    read = [msgspec.json.decode(body, type=_Body) for body in bodies]
    answers = llm.generate([body.prompt for body in read], [body.sampling for body in read])
    return sum(len(answer.token_ids) for answer in answers)


if __name__ == "__main__":
    configure_logging("warning")  # on stderr; what is on stdout is read
    order = msgspec.json.decode(sys.argv[1], type=Offline)
    sys.stdout.buffer.write(msgspec.json.encode(order.measure()))
