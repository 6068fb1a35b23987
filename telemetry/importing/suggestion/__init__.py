"""Ambiguities that only the owner of the tables can resolve, reported together before a long import.

``guesses`` suggests targets for unknown columns. ``questions`` collects these and other ambiguities of the first rows,
and proposes a mapping. ``trial`` finds further ones by importing each table into a scratch folder.
"""
