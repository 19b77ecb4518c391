"""The HTTP frontend: OpenAI-style requests in, text out.

One file per idea. `server.py` runs hypercorn, `app.py` routes, `exchange.py` carries one request and its answer,
`bodies.py` and `answers.py` say what goes in and out, `chat.py`, `completions.py`, `models.py`, `tokenization.py`,
`health.py`, `metrics.py` and `openapi.py` are the endpoints.
Next on the path: `busllm/requests/`, which owns what is submitted.
"""
