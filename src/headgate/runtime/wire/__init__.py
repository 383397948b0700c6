"""Communication of processes: authenticated connections, control messages, channels with credit, spilling to disk."""
