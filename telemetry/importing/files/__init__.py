"""Source files (``sources``) and the table reader (``tables``): CSV, JSON and Parquet, wide or long.

Every reader yields row numbers (from 1, excluding the header) and a table of strings (Parquet: the file's types).
Malformed rows go to the quarantine.
"""
