"""The durable side of a pipeline: the log of its checkpoints, the upload of snapshots, and their restore."""
