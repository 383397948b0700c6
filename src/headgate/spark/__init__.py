"""Headgate on Spark: the session, the barrier stage that runs the workers, DataFrames, and state as a data source.

This is the only package that imports PySpark and uses its names. It makes no decisions: it starts processes, ends jobs
and passes tables on. ``runtime.driver`` decides.
"""
