"""busllm beside other servers: the same loads on the same machine, in turns.

    make bench                                 all rows, three rounds, every installed peer
    make bench-peers                           install the peers (llama.cpp and vLLM for CPUs)
    python -m bench.compare --help             fewer rows, rounds or peers; every weight format of ours

The path: `__main__.py` (flags) → `rows.py` (the table) → `rounds.py` (whose turn it is) → `peers/` (how each is
started) → `server.py` and `process_tree.py` (one that runs) → `client.py` (`busllm bench` as its load) → `results.py`
(what is kept) → `summary.py` (medians and ratios) → `text_table.py`, `page.py` and `bars.py`.
"""
