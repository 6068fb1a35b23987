"""The command line of predrain: one module or folder a verb; the only package that may import every room.

Arguments come in; the rooms do the work; lines or JSON go to the terminal. ``command`` lists the verbs, ``options`` and
``console`` hold what they share. A verb imports its rooms when it runs, so that ``predrain --help`` is instant.
"""
