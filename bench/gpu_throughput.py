"""Offline throughput on a CUDA device: many sequences at once, random tokens, random weights of a published shape.

    python -m bench.gpu_throughput [--sequences 256] [--seed 0] [--temperature 0.6]

Owns: the workload (prompts and answers of 100 … 1,024 tokens), the ways that are compared, the table.
Does not know: HTTP, the bus, text. `busllm bench` measures a running server.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch

from busllm.engine.attention.choose import attention_factory
from busllm.engine.config import EngineConfig
from busllm.engine.cuda_graph import CudaGraphRecorder
from busllm.engine.engine import Engine
from busllm.engine.memory_profile import kv_bytes_of_share
from busllm.errors import MissingPackage
from busllm.sampling import SamplingParams
from busllm.testing.engine_driver import sequence_request
from busllm.testing.random_runner import QWEN3_0_6B, RandomWeights, random_runner

SHORTEST, LONGEST = 100, 1024
PAGE_TOKENS = 16
KV_SHARE = 0.8


@dataclass(frozen=True)
class Way:
    """One way to compute decode steps."""

    name: str
    is_recorded: bool


WAYS = (Way("flashinfer, CUDA graphs", True), Way("flashinfer, launched", False))


@dataclass(frozen=True)
class Measured:
    """What one way gave; seconds, tokens."""

    way: Way
    start_s: float
    run_s: float
    prompt_tokens: int
    output_tokens: int
    steps: int


def measure(way: Way, num_sequences: int, seed: int, temperature: float) -> Measured:
    """Loads, warms up, and computes all sequences."""
    source = np.random.default_rng(seed)
    prompt_lengths, output_lengths = source.integers(SHORTEST, LONGEST + 1, size=(2, num_sequences))
    prompts = [source.integers(QWEN3_0_6B["vocab_size"], size=length).tolist() for length in prompt_lengths]
    began = time.perf_counter()
    engine = make_engine(way, num_sequences)
    engine.submit(sequence_request("warm", prompts[0][:SHORTEST], SamplingParams(max_tokens=8)))
    while engine.has_work:
        engine.step()
    engine.reset_cache()
    torch.cuda.synchronize()
    start_s = time.perf_counter() - began
    before = engine.statistics()
    began = time.perf_counter()
    for index, (prompt, length) in enumerate(zip(prompts, output_lengths, strict=True)):
        params = SamplingParams(temperature=temperature, max_tokens=int(length), ignore_eos=True)
        engine.submit(sequence_request(f"u{index}", prompt, params, seed=index))
    while engine.has_work:
        engine.step()
    run_s = time.perf_counter() - began
    engine.check_integrity()
    after = engine.statistics()
    engine.close()
    torch.cuda.empty_cache()
    return Measured(
        way,
        start_s,
        run_s,
        int(prompt_lengths.sum()),
        after.output_tokens - before.output_tokens,
        after.steps - before.steps,
    )


def make_engine(way: Way, max_running: int) -> Engine:
    """An engine of the shape of Qwen3-0.6B, with pages for all sequences if the device has room for them."""
    device = torch.device("cuda", torch.cuda.current_device())
    runner = random_runner(
        QWEN3_0_6B,
        attention_factory("flashinfer"),
        device=device,
        dtype=torch.bfloat16,
        recorder=CudaGraphRecorder(device) if way.is_recorded else None,
        weights=RandomWeights(device, torch.bfloat16, std=0.02),
    )
    config = EngineConfig(
        num_pages=max_running * (2 * LONGEST // PAGE_TOKENS + 1),
        page_tokens=PAGE_TOKENS,
        step_tokens=8192,
        max_running=max_running,
        max_context_tokens=2 * LONGEST + 1,
    )
    possible = kv_bytes_of_share(runner, KV_SHARE, config) // (runner.model.kv_bytes_per_token * PAGE_TOKENS)
    return Engine(runner, EngineConfig(**{**_fields(config), "num_pages": min(config.num_pages, possible)}))


def _fields(config: EngineConfig) -> dict[str, int | bool]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


def print_table(results: list[Measured]) -> None:
    """One line per way."""
    print(f"{'':26} {'start s':>8} {'run s':>8} {'steps':>7} {'output tok/s':>13} {'all tok/s':>10}")
    for one in results:
        rate, all_rate = one.output_tokens / one.run_s, (one.output_tokens + one.prompt_tokens) / one.run_s
        print(f"{one.way.name:26} {one.start_s:8.1f} {one.run_s:8.1f} {one.steps:7} {rate:13,.0f} {all_rate:10,.0f}")


def main(arguments: list[str] | None = None) -> int:
    """Measures every way and prints the table; the exit status is 2 when there is nothing to measure it on."""
    parser = argparse.ArgumentParser(description="Offline throughput with random weights on a CUDA device.")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.6)
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA device; nothing is measured.", file=sys.stderr)
        return 2
    try:
        attention_factory("flashinfer")
    except MissingPackage as error:
        print(error, file=sys.stderr)
        return 2
    print(
        f"{torch.cuda.get_device_name()}, Qwen3-0.6B shape, bfloat16, {chosen.sequences} sequences, "
        f"prompts and answers of {SHORTEST} to {LONGEST} tokens, temperature {chosen.temperature}"
    )
    print_table([measure(way, chosen.sequences, chosen.seed, chosen.temperature) for way in WAYS])
    return 0


if __name__ == "__main__":
    sys.exit(main())
