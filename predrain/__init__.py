"""The command line of predrain: one module or folder per verb; the only package that may import every room.

Verbs parse arguments, call the rooms, and print text or JSON. ``command`` lists the verbs; ``options`` and ``console``
have shared code. A verb imports its rooms when it runs, so that ``predrain --help`` is instant.
"""
