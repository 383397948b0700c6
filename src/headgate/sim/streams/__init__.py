"""Runs of the stream store: pipelines between streams, neighbours, reader groups, transactions of several processes."""
