"""The life of requests at their owner: attempts, deadlines, routing, sending on. Used by frontends and by `Client`.

Next on the path: `owner.py`, then the stages that it sends to.
"""
