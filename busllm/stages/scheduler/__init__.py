"""The scheduler, rank 0 of a replica: `stage.py` is its behaviour, `engine_thread.py` runs the engine beside the bus,
`held_sequence.py` is what the event loop knows of a sequence, `detokenizer_link.py` the batches to one detokenizer."""
