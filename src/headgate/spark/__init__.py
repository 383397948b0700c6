"""Headgate on Spark: the session, the barrier stage whose tasks are workers, DataFrames, and state as a data source.

The only room that imports PySpark, and so the only one with its names. It decides nothing: it starts processes,
ends jobs and hands tables over; what that means is ``runtime.driver``'s business.
"""
