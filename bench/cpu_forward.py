"""How long a step of the compiled forward pass takes, whole and in parts, and how many tokens `busllm.LLM` makes.

    python bench/cpu_forward.py [--quantization auto] [--context 160] [--threads N] [--parts] [--llm] [--model NAME]

Times are medians in milliseconds; on a machine with other work compare ratios only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from busllm.engine.openmp import calm_openmp
from busllm.errors import BusllmError

BATCHES = (1, 8, 32, 64)
CHUNKS = (64, 256)
PAGE_TOKENS = 16
ROUNDS, TRIALS = 25, 10  # steps that are timed; before them, those in which a decoder tries how many cores to use


def main() -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default="auto", choices=["auto", "none", "int8", "int4"])
    parser.add_argument("--context", type=int, default=160, help="tokens of each decoding sequence")
    parser.add_argument("--threads", type=int, help="cores; default: all")
    parser.add_argument("--parts", action="store_true", help="also each part of a step")
    parser.add_argument("--llm", action="store_true", help="also tokens per second of busllm.LLM, sampling included")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        os.environ["OMP_NUM_THREADS"] = os.environ["NUMBA_NUM_THREADS"] = str(arguments.threads)
    calm_openmp()  # before torch is imported
    from busllm.engine.loader import LoadConfig, load_runner

    config = LoadConfig(device="cpu", attention="cpu", quantization=arguments.quantization)
    started = time.perf_counter()
    runner = load_runner(arguments.model, config)
    print(f"{runner.model.attention}; loaded in {time.perf_counter() - started:.1f} s")
    check_context(parser, arguments.context, runner._decoder.config.max_context_tokens)
    steps = Steps(runner._decoder, arguments.context)
    decoding = {f"decode  {n:4}": [(slot, arguments.context - 1, 1) for slot in range(n)] for n in BATCHES}
    prefilling = {f"prefill {n:4}": [(0, 0, n)] for n in CHUNKS}
    for name, rows in (decoding | prefilling).items():
        hidden, head = steps.time(rows)
        num_tokens = sum(count for *_, count in rows)
        speed = 1e3 * num_tokens / (hidden + head)
        print(f"{name} rows: layers {hidden:7.2f}  head {head:6.2f}  {speed:6.0f} tok/s", flush=True)
        if arguments.parts:
            steps.print_parts()
    if arguments.llm:
        measure_llm(arguments.model, arguments.quantization)


def check_context(parser: argparse.ArgumentParser, context: int, most: int) -> None:
    """Ends the command with a usage error where sequences of so many tokens do not fit the model."""
    if not 1 <= context <= most:
        parser.error(f"argument --context: {context} is not within 1 and {most}, the model's own limit")


class Steps:
    """Steps of one decoder over random tokens, in pages that lie scattered."""

    def __init__(self, decoder, context: int) -> None:  # type: ignore[no-untyped-def]
        import numpy as np
        import torch

        from busllm.engine.batch import SlotPages
        from busllm.engine.cpu.cpu_attention import CpuAttention
        from busllm.engine.kv_cache import KVShape
        from busllm.engine.models.protocol import attention_config
        from busllm.plan import PagesAssigned

        tokens_each = max(context, *CHUNKS)
        pages_each = -(-tokens_each // PAGE_TOKENS)
        num_pages, shape = pages_each * max(BATCHES), decoder.config.attention_shape
        kv = KVShape(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_pages=num_pages,
            page_tokens=PAGE_TOKENS,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )
        self._source = np.random.default_rng(0)
        self._decoder, self._attention = decoder, CpuAttention(attention_config(shape, kv))
        self._tables = SlotPages(
            max_running=max(BATCHES), max_context_tokens=tokens_each, num_pages=num_pages, page_tokens=PAGE_TOKENS
        )
        shuffled = [int(page) for page in self._source.permutation(num_pages)]
        for slot in range(max(BATCHES)):
            pages = tuple(shuffled[slot * pages_each : (slot + 1) * pages_each])
            self._tables.assign(PagesAssigned(slot, 0, pages))

    def time(self, rows: Sequence[tuple[int, int, int]]) -> tuple[float, float]:
        """Rows of (sequence, start, tokens); medians of the layers (preparation included) and of the head."""
        import torch

        from busllm.engine.batch import make_batch
        from busllm.plan import PlanRow, StepPlan

        plan_rows = tuple(PlanRow(slot, start, count, bytes(4 * count), None, True) for slot, start, count in rows)
        self._batch = batch = make_batch(StepPlan(0, plan_rows, sum(count == 1 for *_, count in rows)), self._tables)
        last = torch.from_numpy(batch.cu_seqlens[1:].astype("int64") - 1)
        layers, heads = [], []
        for _ in range(TRIALS + ROUNDS):
            ids = torch.from_numpy(self._source.integers(0, self._decoder.config.vocab_size, batch.num_tokens))
            begun = time.perf_counter()
            self._attention.prepare(batch)
            positions, slots = torch.from_numpy(batch.positions), torch.from_numpy(batch.cache_slots)
            states = self._decoder.hidden_states(ids, positions, slots, self._attention)
            between = time.perf_counter()
            self._decoder.logits(states[last])
            layers.append(between - begun)
            heads.append(time.perf_counter() - between)
        return 1e3 * statistics.median(layers[TRIALS:]), 1e3 * statistics.median(heads[TRIALS:])

    def print_parts(self) -> None:
        """Each part of the last step, for all layers, its outputs shared by the cores (a step of many rows shares rows
        instead and takes less than their sum); calls from Python add some microseconds to each.
        """
        import numpy as np

        from busllm.engine.cpu import step
        from busllm.engine.cpu.attention import attend
        from busllm.engine.cpu.linear import multiply
        from busllm.engine.cpu.shapes import Part

        decoder, batch, heads = self._decoder, self._attention.batch, self._attention.heads
        model, sizes, space, cache = decoder._model, decoder._sizes, decoder._space, self._attention.cache.arrays
        rows = len(batch.positions)
        outs = {Part.QUERIES_KEYS_VALUES: space.merged, Part.GATE_UP: space.gated}
        whole, every = np.array([0, rows]), range(sizes.num_layers)
        dense = [layer for layer in every if not model.has_experts[layer]]

        sources = {Part.ATTENTION_OUTPUT: space.attended, Part.DOWN: space.gated}

        def product(part: Part) -> Callable[[int], object]:
            return lambda n: multiply(model.linears[n, part], space, whole, outs.get(part, space.branch))

        parts: dict[str, tuple[Callable[[int], object], Sequence[int]]] = {
            part.name.lower(): (product(part), dense if part in (Part.GATE_UP, Part.DOWN) else every) for part in Part
        }
        parts |= {
            "norms (one of two)": (
                lambda n: step._normalise(model.linears[n, 0], model.norms[2 * n], sizes, space, whole, True),
                every,
            ),
            "rotate, store": (
                lambda n: step._rotate_and_store(model, n, sizes.norm_epsilon, heads, batch, cache, space, whole),
                every,
            ),
            "attention": (
                lambda n: attend(
                    space.queries, cache.keys, cache.values, n, batch, model.windows[n], heads, space.attended
                ),
                every,
            ),
            "activation": (lambda n: step._gate(model.linears[n, 3], sizes.gate_size, space, whole), dense),
            "experts": (
                lambda n: step._visit_experts(model.routers[n], model.linears[n], sizes, space, decoder._mixture, rows),
                [layer for layer in every if model.has_experts[layer]],
            ),
        }
        for name, (run, layers) in parts.items():
            if not layers:
                continue
            if name.upper() in Part.__members__:  # where inputs lie depends on the linear
                part = Part[name.upper()]
                step._prepare(model.linears[layers[0], part], space, sources.get(part, space.normed), whole)
            times = []
            for _ in range(5):
                begun = time.perf_counter()
                for layer in layers:
                    run(layer)
                times.append(time.perf_counter() - begun)
            print(f"    {name:22} {1e3 * statistics.median(times):7.2f}")


def measure_llm(model: str, quantization: str) -> None:
    """Prompts of about 100 tokens, answers of 128, all at once."""
    import busllm

    sampling = busllm.SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    with busllm.LLM(model, attention="cpu", quantization=quantization, prefix_cache="none", kv_tokens=32768) as llm:
        for count in BATCHES:
            prompts = [[1000 + 7 * sequence + index for index in range(100)] for sequence in range(count)]
            llm.generate(prompts[:1], busllm.SamplingParams(temperature=0.0, max_tokens=2))
            begun = time.perf_counter()
            llm.generate(prompts, sampling)
            print(f"LLM {count:3} sequences: {128 * count / (time.perf_counter() - begun):6.0f} tok/s")


if __name__ == "__main__":
    try:
        main()
    except BusllmError as error:
        sys.exit(f"bench: {error.message}")
