"""Simulated runs of the stream store: pipelines between streams, neighbours, reader groups, shared transactions."""
