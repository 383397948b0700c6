"""The archive of classes by which Spark's Java starts sooner."""
