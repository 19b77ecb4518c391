"""The servers that are compared: how each is installed and started. `peer.py` says what one is; `choice.py` has all."""
