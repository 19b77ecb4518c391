"""busllm: an LLM inference server whose stages are actors on a message bus."""
