"""Answers that follow a grammar: which tokens may come next.

`vocabulary.py` is what a grammar must know of a model's tokens, `compiler.py` makes a `matcher.py` of a `Grammar`. Used
by the tokenizer, which refuses what does not compile, and by the engine, which masks logits. No torch here: everything
is on the CPU, in llguidance, which is imported when the first grammar comes.
"""
