"""Load on an OpenAI-compatible server: prompts, raw HTTP, the run, its figures and their pictures. Knows no flags."""
