"""Objects by path, with create-if-absent: local files, memory and object stores. Knows nothing of the stream store."""
