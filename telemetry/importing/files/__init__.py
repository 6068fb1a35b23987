"""Source files (``sources``) and the one reader of tables (``tables``): CSV, JSON, Parquet, and a row for each value.

Every reader yields row numbers in the file, from 1 without the header, and a table of text (Parquet: of the file's
types). What is not a row goes to the quarantine.
"""
