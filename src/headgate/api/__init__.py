"""The public API: pipelines, streams, configuration."""
