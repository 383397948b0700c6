"""What is durable of a pipeline: the log of its checkpoints, the upload of snapshots, and what is restored of them."""
