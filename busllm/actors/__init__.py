"""Actors: a mailbox, a run loop, a status; who else is there; how they are kept running. Knows no stage."""
