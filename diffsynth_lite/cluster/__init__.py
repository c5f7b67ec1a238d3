"""The same commands on a Ray cluster, which places, retries and watches; a task is a command, unchanged.

Ray is imported in this room only, and only when a command is given ``--ray``.
"""
