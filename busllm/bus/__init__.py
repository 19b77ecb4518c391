"""The message bus: bytes from actor to actor. Start reading at `protocol.py`."""
