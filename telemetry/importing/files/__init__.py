"""Rows of source files, in batches of bounded size: CSV, JSON, Parquet, and tables with a row for each value.

Every reader yields row numbers in the file, from 1 without the header, and a table of text (Parquet: of the file's
types). What is not a row goes to the quarantine.
"""
