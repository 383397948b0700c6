"""Between processes: authenticated connections, control messages, channels with credit, and what spills to disk."""
