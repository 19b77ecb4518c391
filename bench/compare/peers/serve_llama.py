"""llama.cpp's own HTTP server, in the foreground: run by the interpreter of its virtual environment, never imported.

    serve_llama.py MODEL.gguf PORT KV_TOKENS SLOTS THREADS

Owns: its settings. Each slot has an equal part of the KV cache: in one that they share, attention of every sequence
would pass over the keys of all the others.
Does not know: anything of busllm, which is not installed there.
"""

from __future__ import annotations

import signal
import sys

import xllamacpp


def main() -> None:
    """Serves until a signal ends it."""
    path, port, kv_tokens, slots, threads = sys.argv[1], *map(int, sys.argv[2:6])
    parameters = xllamacpp.CommonParams()
    parameters.model.path = path
    parameters.hostnames, parameters.port = ["127.0.0.1"], port
    parameters.n_parallel, parameters.n_ctx, parameters.kv_unified = slots, kv_tokens, False
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
