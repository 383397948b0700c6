"""Files as source and as transactional sink: text, JSON lines and Parquet."""
