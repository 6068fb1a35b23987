"""A bundle's profile scored by what a server needs and no more: neither pandas nor any library that trains is imported.

:mod:`~models.light.bundle` verifies a bundle by the same rules as :mod:`models.bundle` and gives the same scores;
:mod:`~models.light.learners` reads the profile's learners. What cannot be read so raises
:class:`~models.light.errors.HeavyModelError`, and the full bundle takes over.
"""
