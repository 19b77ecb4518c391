"""What travels: one file per recipient, so that a stage's inbox can be read in one place.

Owns: the tagged Structs on every subject, their encoding (`codec.py`) and the splitting of what is larger than the bus
carries (`parts.py`).
Does not know: the bus (bytes only) and the stages.
"""
