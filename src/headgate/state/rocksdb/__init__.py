"""Keyed state in RocksDB, larger than memory: one database for each operator and subtask (docs/spec/rocksdb.md)."""
