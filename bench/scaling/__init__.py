"""How busllm grows: with waiting requests, cache, batch, context, subjects and stages. `python -m bench.scaling`."""
