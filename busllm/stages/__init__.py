"""The stops of a request's path, one file or folder each: frontend → tokenizer → scheduler → detokenizer → frontend.

Stages never import each other; they meet on the bus.
"""
